#include "src/fsdp/testing/stream_memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ppfsdp::fsdp::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class StreamMemoryTest : public ::testing::Test {
 protected:
  static constexpr int kCompute = StreamMemory::kCompute;

  at::Tensor make(int stream) {
    const StreamMemory::On on(memory, stream);
    return at::empty({8}, at::TensorOptions(at::kMeta));
  }
  void write(int stream, const at::Tensor& tensor) {
    const StreamMemory::On on(memory, stream);
    tensor.fill_(1);
  }
  void read(int stream, const at::Tensor& tensor) {
    const StreamMemory::On on(memory, stream);
    tensor.add(1);
  }
  void wait(int stream, int other) { memory.wait(stream, memory.record(other)); }

  StreamMemory memory;
  const int side = memory.add_stream("side");
};

// An access that is not ordered behind a write, or a write behind a read, of another stream.
TEST_F(StreamMemoryTest, FindsUnorderedAccesses) {
  const at::Tensor tensor = make(kCompute);
  write(kCompute, tensor);
  wait(side, kCompute);
  read(side, tensor);
  EXPECT_THAT(memory.faults(), IsEmpty());
  read(kCompute, tensor);
  EXPECT_THAT(memory.faults(), IsEmpty()) << "two readers need no order";
  write(kCompute, tensor);
  EXPECT_THAT(memory.faults(), ElementsAre(HasSubstr("compute writes a tensor of 32 bytes of "
                                                     "compute's that is still read by side")));
  read(side, tensor);
  EXPECT_THAT(memory.faults().back(),
              HasSubstr("side reads a tensor of 32 bytes of compute's before it is written by"));
}

// What compute did before in the memory that it now allocates may still go on.
TEST_F(StreamMemoryTest, FindsAFirstWriteThatDoesNotWaitForTheOwner) {
  write(kCompute, make(kCompute));
  const at::Tensor fresh = make(kCompute);
  write(side, fresh);
  EXPECT_THAT(memory.faults(), ElementsAre(HasSubstr("what that did there before")));
}

TEST_F(StreamMemoryTest, AStreamMayWriteItsOwnMemoryAtOnce) {
  write(kCompute, make(kCompute));
  write(side, make(side));
  EXPECT_THAT(memory.faults(), IsEmpty());
}

// The block may be given out again, to work that the other stream's use does not hold up.
TEST_F(StreamMemoryTest, FindsMemoryFreedWhileAnotherStreamUsesIt) {
  for (const int owner : {kCompute, side}) {
    const int other = owner == kCompute ? side : kCompute;
    at::Tensor tensor = make(owner);
    write(owner, tensor);
    wait(other, owner);
    read(other, tensor);
    tensor.reset();
    write(owner, make(owner));
    EXPECT_THAT(memory.faults().back(), HasSubstr("freed memory still used by"));
    // Once it is waited for it is no fault any more.
    const size_t found = memory.faults().size();
    wait(owner, other);
    write(owner, make(owner));
    EXPECT_EQ(memory.faults().size(), found);
  }
}

// Waiting after the last reference went is soon enough if nothing was written in between.
TEST_F(StreamMemoryTest, TheOwnerMayWaitAfterTheFree) {
  at::Tensor tensor = make(side);
  write(side, tensor);
  wait(kCompute, side);
  read(kCompute, tensor);
  tensor.reset();
  const at::Tensor next = make(side);
  wait(side, kCompute);
  write(side, next);
  EXPECT_THAT(memory.faults(), IsEmpty());
}

TEST_F(StreamMemoryTest, SeesBackward) {
  at::Tensor x = at::ones({2, 3}, at::TensorOptions(at::kMeta));
  x.set_requires_grad(true);
  const at::Tensor w = at::ones({4, 3}, at::TensorOptions(at::kMeta));
  const at::Tensor y = at::linear(x, w).sum();
  wait(side, kCompute);
  {
    const StreamMemory::On on(memory, side);
    memory.access(w, /*writes=*/true);
  }
  y.backward();
  EXPECT_THAT(memory.faults(), ElementsAre(HasSubstr("before it is written by side")));
}

}  // namespace
}  // namespace ppfsdp::fsdp::testing
