#include "src/train/metrics.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>

#include "src/train/config_error.h"
#include "src/train/event_file.h"
#include "src/train/test_util.h"

namespace ppfsdp::train {
namespace {

using nlohmann::json;

class MetricsTest : public FolderTest {
 protected:
  void SetUp() override {
    FolderTest::SetUp();
    out_ = std::tmpfile();
    config_.jsonl = path("m.jsonl");
  }
  void TearDown() override {
    std::fclose(out_);
    FolderTest::TearDown();
  }

  std::string printed() const {
    std::string text(static_cast<size_t>(std::ftell(out_)), '\0');
    std::rewind(out_);
    EXPECT_EQ(std::fread(text.data(), 1, text.size(), out_), text.size());
    return text;
  }

  std::vector<json> lines() const {
    std::ifstream file(folder_ / "m.jsonl");
    std::vector<json> records;
    for (std::string line; std::getline(file, line);) records.push_back(json::parse(line));
    return records;
  }

  std::string event_bytes(const std::string& folder) const {
    std::string bytes;
    for (const auto& entry : std::filesystem::directory_iterator(folder_ / folder)) {
      std::ifstream file(entry.path(), std::ios::binary);
      bytes.append(std::istreambuf_iterator<char>(file), {});
    }
    return bytes;
  }

  std::FILE* out_ = nullptr;
  MetricsConfig config_;
};

TEST_F(MetricsTest, line_has_the_terms_of_torchtitan) {
  StepRecord record{7,      5.54517,   1.25,  3e-3,
                    0.0831, 1234567.4, 0.412, {int64_t{1} << 28, int64_t{1} << 30}};
  EXPECT_EQ(console_line(record),
            "step:  7  loss:  5.5452  grad_norm:  1.2500  lr: 3.00e-03  tokens/s: 1,234,567  mfu: "
            "41.2%  memory: 0.25GiB(25.0%)  time: 83.1ms");
  record.tokens_per_second = 999;
  EXPECT_NE(console_line(record).find("tokens/s: 999  "), std::string::npos);
}

// Rates are means over the steps since the last record, and the last step is always logged.
TEST_F(MetricsTest, logs_every_few_steps_and_the_last) {
  config_.log_every = 2;
  {
    Metrics metrics(config_, {5, 100, 20.0, 40000.0}, out_, out_);
    for (int64_t step = 1; step <= 5; ++step) {
      metrics.step(step, static_cast<double>(step), 0.5, 0.25, step == 4 ? 0.75 : 0.25,
                   {1000 + step, 4000});
    }
    metrics.finish();
  }
  const std::vector<json> records = lines();
  ASSERT_EQ(records.size(), 3u);
  EXPECT_EQ(records[0]["step"], 2);
  EXPECT_EQ(records[1]["step"], 4);
  EXPECT_EQ(records[2]["step"], 5);
  EXPECT_EQ(records[1]["loss"], 4.0);
  EXPECT_EQ(records[1]["grad_norm"], 0.5);
  EXPECT_EQ(records[1]["lr"], 0.25);
  EXPECT_EQ(records[0]["ms"], 250.0);
  EXPECT_EQ(records[1]["ms"], 500.0);
  EXPECT_EQ(records[1]["tokens_per_second"], 200.0);
  EXPECT_EQ(records[1]["mfu"], 0.1);
  EXPECT_EQ(records[1]["memory_bytes"], 1004);
  const std::string text = printed();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 3);
  EXPECT_EQ(text.find('\r'), std::string::npos) << "a bar must not go to what is no terminal";
}

// The peak of a device is measured when there is one.
TEST_F(MetricsTest, takes_a_peak_later) {
  Metrics metrics(config_, {2, 100, 20.0, 0.0}, out_, out_);
  metrics.step(1, 1, 1, 1, 0.5, {});
  metrics.set_peak_flops(40000.0);
  metrics.step(2, 1, 1, 1, 0.5, {});
  const std::vector<json> records = lines();
  ASSERT_EQ(records.size(), 2u);
  EXPECT_EQ(records[0]["mfu"], 0.0);
  EXPECT_EQ(records[1]["mfu"], 0.1);
}

// The sign of a NaN differs between machines and means nothing.
TEST_F(MetricsTest, nan_has_no_sign) {
  const std::string line = console_line({1, -std::nan(""), -std::nan(""), 0, 1, 1, 0, {}});
  EXPECT_NE(line.find("loss: nan"), std::string::npos) << line;
  EXPECT_NE(line.find("grad_norm: nan"), std::string::npos) << line;
}

TEST_F(MetricsTest, terminal_gets_a_bar_that_is_wiped) {
  const int terminal = posix_openpt(O_RDWR | O_NOCTTY);
  ASSERT_GE(terminal, 0);
  ASSERT_EQ(grantpt(terminal) | unlockpt(terminal), 0);
  std::FILE* user = std::fopen(ptsname(terminal), "w");
  ASSERT_NE(user, nullptr);
  {
    Metrics metrics(config_, {100000, 1, 0, 0}, out_, user);
    metrics.step(10000, 1, 1, 1, 20000, {});
    metrics.finish();
  }
  char shown[256] = {};
  ASSERT_GT(read(terminal, shown, sizeof(shown) - 1), 0);
  std::fclose(user);
  close(terminal);
  // 90000 steps of 2 s are left.
  EXPECT_EQ(std::string(shown),
            "\r[===                           ] 10000/100000  50:00:00 left\x1b[K\r\x1b[K");
}

// After Ctrl-C the steps that were done must not be lost to log_every.
TEST_F(MetricsTest, finish_logs_what_is_left) {
  config_.log_every = 10;
  Metrics metrics(config_, {100, 1, 0, 0}, out_, out_);
  for (int64_t step = 1; step <= 13; ++step) metrics.step(step, 1, 1, 1, 1, {});
  metrics.finish();
  metrics.finish();
  ASSERT_EQ(lines().size(), 2u);
  EXPECT_EQ(lines()[1]["step"], 13);
  EXPECT_EQ(lines()[1]["mfu"], 0.0) << "without a peak there is no MFU, and no division by zero";
}

TEST_F(MetricsTest, json_stays_valid_when_the_loss_does_not) {
  Metrics metrics(config_, {1, 1, 0, 0}, out_, out_);
  metrics.step(1, std::nan(""), std::numeric_limits<double>::infinity(), 1, 1, {});
  ASSERT_EQ(lines().size(), 1u);
  EXPECT_TRUE(lines()[0]["loss"].is_null());
  EXPECT_TRUE(lines()[0]["grad_norm"].is_null());
}

// Whole records after every step, in the frame that TensorBoard reads.
TEST_F(MetricsTest, tensorboard_file_grows_by_whole_records) {
  config_.tensorboard = path("tb");
  Metrics metrics(config_, {3, 1, 0, 0}, out_, out_);
  for (int64_t step = 1; step <= 2; ++step) {
    metrics.step(step, 2.5, 1, 1, 1, {});
    const std::string bytes = event_bytes("tb");
    int64_t records = 0;
    size_t at = 0;
    while (at < bytes.size()) {
      uint64_t length = 0;
      for (int byte = 7; byte >= 0; --byte) {
        length = length << 8 | static_cast<unsigned char>(bytes.at(at + static_cast<size_t>(byte)));
      }
      const std::string body = bytes.substr(at + 12, length);
      ASSERT_EQ(bytes.substr(at, 16 + length), tf_record(body));
      EXPECT_EQ(body.find("loss_metrics/global_avg_loss") != std::string::npos, records > 0);
      at += 16 + length;
      ++records;
    }
    EXPECT_EQ(records, 1 + step) << "the version record and one a step";
  }
}

TEST_F(MetricsTest, files_of_an_earlier_run) {
  const auto run = [&](const std::string& if_exists) {
    config_.if_exists = if_exists;
    Metrics metrics(config_, {1, 1, 0, 0}, out_, out_);
    metrics.step(1, 2, 1, 1, 1, {});
  };
  const auto event_files = [&] {
    return std::distance(std::filesystem::directory_iterator(folder_ / "tb"), {});
  };
  run("error");
  EXPECT_THROW(run("error"), ConfigError);
  run("append");
  EXPECT_EQ(lines().size(), 2u);
  run("overwrite");
  EXPECT_EQ(lines().size(), 1u);

  config_.jsonl.clear();
  config_.tensorboard = path("tb");
  run("error");
  write("tb/mine.txt", "not an event file");
  EXPECT_EQ(message_of<ConfigError>([&] { run("error"); }),
            "metrics.tensorboard: " + path("tb") +
                " holds event files already; name another folder, or set metrics.if_exists to "
                "\"append\" or \"overwrite\"");
  run("append");
  EXPECT_EQ(event_files(), 3);
  run("overwrite");
  EXPECT_EQ(event_files(), 2) << "only event files may be removed";
}

}  // namespace
}  // namespace ppfsdp::train
