#pragma once

#include <string>

namespace ppfsdp::golden {

/// A hash over the bits of some products, norms and functions that a training step uses. Another
/// processor may run other kernels, which add in another order; where the fingerprint is that of a
/// recording, results must equal the recording's bit for bit.
std::string kernel_fingerprint();

}  // namespace ppfsdp::golden
