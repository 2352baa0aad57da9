#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "src/comm/runtime.h"
#include "src/train/config.h"

namespace ppfsdp::train {

/// One logged step.
struct StepRecord {
  int64_t step = 0;              ///< counted from 1
  double loss = 0;               ///< mean over the global batch, before the step
  double grad_norm = 0;          ///< of the whole gradient, before clipping
  double lr = 0;                 ///< that the step used
  double step_seconds = 0;       ///< mean since the last record
  double tokens_per_second = 0;  ///< of all ranks together
  double mfu = 0;                ///< model FLOPs a second over the peak's; 1 is all of it
  comm::MemoryUse memory;        ///< of the device; on a CPU, of this process and machine
};

/// Somewhere that records go. Throws std::runtime_error when it can't take one.
class MetricsSink {
 public:
  virtual ~MetricsSink() = default;
  virtual void write(const StepRecord& record) = 0;
};

/// What turns times into rates.
struct MetricsScale {
  int64_t steps = 1;            ///< that training has
  int64_t tokens_per_step = 1;  ///< of all ranks together
  double flops_per_token = 0;   ///< forward and backward
  double peak_flops = 0;        ///< FLOP/s of all ranks' devices together; 0: MFU is 0
};

/// Turns the steps of a training run into records, every `log_every` steps and at the last one, and
/// hands them to the sinks that the config names: a line on `out`, a JSON lines file, a TensorBoard
/// event file. Between lines a progress bar stands on `err` if that is a terminal.
class Metrics {
 public:
  /// Opens the files. Throws ConfigError for one that exists (by metrics.if_exists) or can't be
  /// written.
  Metrics(const MetricsConfig& config, const MetricsScale& scale, std::FILE* out, std::FILE* err);
  ~Metrics();

  /// For a peak that is only known once there is a device.
  void set_peak_flops(double peak_flops) { scale_.peak_flops = peak_flops; }

  /// Call after each step in order; `step` counts from 1, `seconds` is what the step took.
  void step(int64_t step, double loss, double grad_norm, double lr, double seconds,
            const comm::MemoryUse& memory);

  /// Logs what is not logged yet and removes the bar; for an end before the last step.
  void finish();

 private:
  void log();
  void draw_bar();
  void clear_bar();

  MetricsConfig config_;
  MetricsScale scale_;
  std::FILE* err_;
  bool show_bar_;
  bool bar_drawn_ = false;
  std::vector<std::unique_ptr<MetricsSink>> sinks_;
  StepRecord last_;
  int64_t unlogged_steps_ = 0;
  double unlogged_seconds_ = 0;
  double total_seconds_ = 0;
};

/// "step:  7  loss:  5.5452  grad_norm:  1.2345  lr: 3.00e-03  tokens/s: 12,345  mfu: 41.2% memory:
/// 0.31GiB(1.3%)  time: 83.1ms": the terms of torchtitan's log, where tokens/s is of all ranks.
std::string console_line(const StepRecord& record);

/// One object a line: step, loss, grad_norm, lr, tokens_per_second, mfu, memory_bytes, ms. A value
/// that is not finite is null. Always whole lines.
std::unique_ptr<MetricsSink> make_jsonl_sink(const std::string& path, const std::string& if_exists);

/// A new event file in `folder`; with "error" the folder must hold none, with "overwrite" those
/// that it holds are removed. The tags are torchtitan's where it has them.
std::unique_ptr<MetricsSink> make_tensorboard_sink(const std::string& folder,
                                                   const std::string& if_exists);

}  // namespace ppfsdp::train
