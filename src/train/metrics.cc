#include "src/train/metrics.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>

#include "src/train/config_error.h"
#include "src/train/event_file.h"
#include "src/train/output_file.h"

namespace ppfsdp::train {
namespace {

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

/// "1234567" as "1,234,567", whatever the locale.
std::string with_commas(int64_t value) {
  std::string text = std::to_string(value);
  for (size_t at = text.size(); at > 3;) {
    at -= 3;
    text.insert(at, ",");
  }
  return text;
}

class ConsoleSink : public MetricsSink {
 public:
  explicit ConsoleSink(std::FILE* out) : out_(out) {}
  void write(const StepRecord& record) override {
    // A reader that has gone away is SIGPIPE's or the writer's matter, not training's.
    std::fputs((console_line(record) + "\n").c_str(), out_);
    std::fflush(out_);
  }

 private:
  std::FILE* out_;
};

class JsonlSink : public MetricsSink {
 public:
  JsonlSink(const std::string& path, IfExists if_exists)
      : file_("metrics.jsonl", path, if_exists) {}
  void write(const StepRecord& record) override {
    const nlohmann::ordered_json line = {
        {"step", record.step},
        {"loss", record.loss},
        {"grad_norm", record.grad_norm},
        {"lr", record.lr},
        {"tokens_per_second", record.tokens_per_second},
        {"mfu", record.mfu},
        {"memory_bytes", record.memory.peak_bytes},
        {"ms", record.step_seconds * 1e3},
    };
    file_.append(line.dump() + "\n");
  }

 private:
  OutputFile file_;
};

double wall_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

class TensorBoardSink : public MetricsSink {
 public:
  explicit TensorBoardSink(const std::string& path)
      : file_("metrics.tensorboard", path, IfExists::kError) {}
  void write(const StepRecord& record) override {
    if (!begun_) file_.append(tf_record(version_event(wall_time())));
    begun_ = true;
    const auto value = [](double number) { return static_cast<float>(number); };
    file_.append(tf_record(scalar_event(
        wall_time(), record.step,
        {{"loss_metrics/global_avg_loss", value(record.loss)},
         {"grad_norm", value(record.grad_norm)},
         {"lr", value(record.lr)},
         {"throughput(tps)", value(record.tokens_per_second)},
         {"mfu(%)", value(record.mfu * 100)},
         {"memory/max_resident(GiB)", value(static_cast<double>(record.memory.peak_bytes) / kGiB)},
         {"time_metrics/end_to_end(s)", value(record.step_seconds)}})));
  }

 private:
  OutputFile file_;
  bool begun_ = false;
};

}  // namespace

std::string console_line(const StepRecord& record) {
  // The sign of a NaN means nothing, but would be printed.
  const auto plain = [](double value) { return std::isnan(value) ? std::abs(value) : value; };
  const auto memory = static_cast<double>(record.memory.peak_bytes);
  const double total = static_cast<double>(std::max<int64_t>(record.memory.total_bytes, 1));
  return fmt::format(
      "step: {:2}  loss: {:7.4f}  grad_norm: {:7.4f}  lr: {:.2e}  tokens/s: {}  mfu: {:.1f}%  "
      "memory: {:.2f}GiB({:.1f}%)  time: {:.1f}ms",
      record.step, plain(record.loss), plain(record.grad_norm), record.lr,
      with_commas(std::llround(record.tokens_per_second)), record.mfu * 100, memory / kGiB,
      memory / total * 100, record.step_seconds * 1e3);
}

std::unique_ptr<MetricsSink> make_jsonl_sink(const std::string& path,
                                             const std::string& if_exists) {
  return std::make_unique<JsonlSink>(path, parse_if_exists(if_exists));
}

std::unique_ptr<MetricsSink> make_tensorboard_sink(const std::string& folder,
                                                   const std::string& if_exists) {
  namespace fs = std::filesystem;
  const IfExists policy = parse_if_exists(if_exists);
  std::vector<fs::path> earlier;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    if (entry->path().filename().string().starts_with("events.out.tfevents.")) {
      earlier.push_back(entry->path());
    }
  }
  if (!earlier.empty() && policy == IfExists::kError) {
    throw ConfigError(fmt::format(
        "metrics.tensorboard: {} holds event files already; name another folder, or set "
        "metrics.if_exists to \"append\" or \"overwrite\"",
        folder));
  }
  if (policy == IfExists::kOverwrite) {
    for (const fs::path& path : earlier) fs::remove(path, error);
  }
  char host[256] = "localhost";
  gethostname(host, sizeof(host) - 1);
  // TensorBoard reads a folder's event files in the order of their names: the time comes first. The
  // number tells apart files of one second.
  const std::string prefix = fmt::format("events.out.tfevents.{:010}.{}.{}.",
                                         static_cast<int64_t>(wall_time()), host, getpid());
  int number = 0;
  while (fs::exists(fs::path(folder) / (prefix + std::to_string(number)), error)) ++number;
  return std::make_unique<TensorBoardSink>(
      (fs::path(folder) / (prefix + std::to_string(number))).string());
}

Metrics::Metrics(const MetricsConfig& config, const MetricsScale& scale, std::FILE* out,
                 std::FILE* err)
    : config_(config),
      scale_(scale),
      err_(err),
      show_bar_(config.progress && isatty(fileno(err)) != 0) {
  sinks_.push_back(std::make_unique<ConsoleSink>(out));
  if (!config.jsonl.empty()) sinks_.push_back(make_jsonl_sink(config.jsonl, config.if_exists));
  if (!config.tensorboard.empty()) {
    sinks_.push_back(make_tensorboard_sink(config.tensorboard, config.if_exists));
  }
}

Metrics::~Metrics() { clear_bar(); }

void Metrics::step(int64_t step, double loss, double grad_norm, double lr, double seconds,
                   const comm::MemoryUse& memory) {
  last_ = {.step = step, .loss = loss, .grad_norm = grad_norm, .lr = lr, .memory = memory};
  ++unlogged_steps_;
  unlogged_seconds_ += seconds;
  total_seconds_ += seconds;
  if (step % config_.log_every == 0 || step == scale_.steps) log();
  if (step < scale_.steps) draw_bar();
}

void Metrics::finish() {
  clear_bar();
  if (unlogged_steps_ > 0) log();
}

void Metrics::log() {
  last_.step_seconds = unlogged_seconds_ / static_cast<double>(unlogged_steps_);
  last_.tokens_per_second = static_cast<double>(scale_.tokens_per_step) / last_.step_seconds;
  last_.mfu = scale_.peak_flops > 0
                  ? last_.tokens_per_second * scale_.flops_per_token / scale_.peak_flops
                  : 0;
  unlogged_steps_ = 0;
  unlogged_seconds_ = 0;
  clear_bar();
  for (const std::unique_ptr<MetricsSink>& sink : sinks_) sink->write(last_);
}

void Metrics::draw_bar() {
  if (!show_bar_) return;
  constexpr int kWidth = 30;
  const double part = static_cast<double>(last_.step) / static_cast<double>(scale_.steps);
  const int filled = static_cast<int>(part * kWidth);
  const double left = total_seconds_ / static_cast<double>(last_.step) *
                      static_cast<double>(scale_.steps - last_.step);
  const int64_t seconds = std::llround(left);
  const std::string time = seconds < 3600 ? fmt::format("{}:{:02}", seconds / 60, seconds % 60)
                                          : fmt::format("{}:{:02}:{:02}", seconds / 3600,
                                                        seconds / 60 % 60, seconds % 60);
  std::fputs(fmt::format("\r[{}{}] {}/{}  {} left\x1b[K", std::string(filled, '='),
                         std::string(kWidth - filled, ' '), last_.step, scale_.steps, time)
                 .c_str(),
             err_);
  std::fflush(err_);
  bar_drawn_ = true;
}

void Metrics::clear_bar() {
  if (!bar_drawn_) return;
  std::fputs("\r\x1b[K", err_);
  std::fflush(err_);
  bar_drawn_ = false;
}

}  // namespace ppfsdp::train
