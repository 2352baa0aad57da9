#include "src/train/data_loader.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <rapidcheck.h>

#include "src/train/config_error.h"
#include "src/train/test_util.h"

namespace ppfsdp::train {
namespace {

class DataLoaderTest : public FolderTest {
 protected:
  Config config() const {
    std::string text;
    for (int i = 0; i < 997; ++i) text += static_cast<char>(i * 31 % 251);
    Config config;
    config.data.files = {write("text", text)};
    config.data.seq_len = 8;
    config.training.global_batch = 24;
    config.training.seed = 5;
    return config;
  }
};

TEST_F(DataLoaderTest, labels_are_the_next_tokens) {
  const DataLoader loader(config(), 256);
  const Batch batch = loader.batch(3, {0, 24});
  ASSERT_EQ(batch.tokens.sizes(), (std::vector<int64_t>{24, 8}));
  EXPECT_EQ(batch.tokens.scalar_type(), at::kLong);
  EXPECT_TRUE(at::equal(batch.tokens.slice(1, 1), batch.labels.slice(1, 0, 7)));
  // The text repeats with period 251 in steps of 31: each token tells the one after it.
  EXPECT_TRUE(at::equal(batch.labels, batch.tokens.add(31).remainder(251)));
}

// What a model on another device is given must be there.
TEST_F(DataLoaderTest, batches_go_to_the_device) {
  const Batch batch = DataLoader(config(), 256).batch(3, {0, 24}, at::kMeta);
  EXPECT_TRUE(batch.tokens.is_meta());
  EXPECT_TRUE(batch.labels.is_meta());
  EXPECT_EQ(batch.labels.sizes(), (std::vector<int64_t>{24, 8}));
  EXPECT_TRUE(batch.labels.is_contiguous());
}

// The ranks' microbatches, put together, are one and the same global batch for every world size and
// number of microbatches.
TEST_F(DataLoaderTest, global_batch_does_not_depend_on_the_world) {
  const Config config = this->config();
  const DataLoader loader(config, 256);
  const Batch whole = loader.batch(11, {0, 24});
  EXPECT_TRUE(rc::check([&] {
    TrainingConfig training = config.training;
    const int world_size = *rc::gen::element(1, 2, 3, 4, 6, 8, 12, 24);
    const int64_t rows = 24 / world_size;
    const auto divides = [&](int64_t parts) { return rows % parts == 0; };
    training.microbatches = *rc::gen::suchThat(rc::gen::inRange<int64_t>(1, rows + 1), divides);
    std::vector<at::Tensor> tokens, labels;
    for (int rank = 0; rank < world_size; ++rank) {
      for (int64_t m = 0; m < training.microbatches; ++m) {
        const Batch batch = loader.batch(11, rank_rows(training, world_size, rank, m));
        tokens.push_back(batch.tokens);
        labels.push_back(batch.labels);
      }
    }
    RC_ASSERT(at::equal(at::cat(tokens), whole.tokens));
    RC_ASSERT(at::equal(at::cat(labels), whole.labels));
  }));
}

TEST_F(DataLoaderTest, seed_and_step_change_the_batch) {
  Config config = this->config();
  const Batch first = DataLoader(config, 256).batch(0, {0, 24});
  EXPECT_TRUE(at::equal(DataLoader(config, 256).batch(0, {0, 24}).tokens, first.tokens));
  EXPECT_FALSE(at::equal(DataLoader(config, 256).batch(1, {0, 24}).tokens, first.tokens));
  config.training.seed = 6;
  EXPECT_FALSE(at::equal(DataLoader(config, 256).batch(0, {0, 24}).tokens, first.tokens));
}

TEST_F(DataLoaderTest, world_must_divide_the_global_batch) {
  TrainingConfig training;
  training.global_batch = 24;
  training.microbatches = 3;
  EXPECT_EQ(rank_rows(training, 4, 2, 1), (RowRange{14, 2}));
  EXPECT_EQ(message_of<ConfigError>([&] { rank_rows(training, 5, 0, 0); }),
            "training.global_batch = 24 is not divisible by 5 ranks x 3 microbatches; the nearest "
            "that is: 30");
  training.global_batch = 2;
  EXPECT_NE(message_of<ConfigError>([&] { rank_rows(training, 4, 0, 0); }).find("that is: 12"),
            std::string::npos);
}

TEST_F(DataLoaderTest, tokens_need_files) {
  Config config;
  config.data.kind = "tokens";
  EXPECT_EQ(message_of<ConfigError>([&] { DataLoader(config, 256); }),
            "data.files: data.kind = \"tokens\" has no default files; name some");
}

TEST_F(DataLoaderTest, dtype_decides_how_ids_are_read) {
  Config config;
  config.data.kind = "tokens";
  config.data.files = {write("ids.bin", std::string("\x01\x00\x02\x00\x03\x00\x04\x00", 8))};
  config.data.seq_len = 1;
  EXPECT_EQ(DataLoader(config, 5).data().size(), 4);
  config.data.dtype = "uint32";
  const DataLoader wide(config, int64_t{1} << 32);
  EXPECT_EQ(wide.batch(0, {0, 1}).tokens.item<int64_t>(), 0x20001);
}

}  // namespace
}  // namespace ppfsdp::train
