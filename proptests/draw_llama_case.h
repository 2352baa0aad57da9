#pragma once

#include "proptests/llama_case.h"

namespace ppfsdp::proptests {

/// A whole number in [low, high], drawn by RapidCheck.
int draw(int low, int high);

/// A case of at most `most_ranks` ranks, drawn by RapidCheck with all that decides its outcome.
LlamaCase draw_llama_case(int most_ranks);

}  // namespace ppfsdp::proptests
