#pragma once

#include "backends/start/launcher.h"

namespace ppfsdp::cli {

/// GPUs that this process sees; 0 in a build without CUDA.
int count_gpus();

/// Which of `gpus` visible GPUs a launched process is to use: its local rank's, or the only one
/// where Slurm shows each task one GPU alone (srun --gpus-per-task=1).
int device_of(const start::Launched& launched, int gpus);

}  // namespace ppfsdp::cli
