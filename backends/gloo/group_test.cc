#include "backends/gloo/group.h"

#include <gtest/gtest.h>

namespace ppfsdp::gloo {
namespace {

TEST(ScratchPool, GivesTheSmallestThatIsLargeEnough) {
  ScratchPool pool;
  const at::Tensor small = pool.take(100);
  const at::Tensor large = pool.take(1000);
  const void* small_memory = small.const_data_ptr();
  const void* large_memory = large.const_data_ptr();
  pool.give_back(large);
  pool.give_back(small);
  EXPECT_EQ(pool.take(50).const_data_ptr(), small_memory);
  EXPECT_EQ(pool.take(50).const_data_ptr(), large_memory);
}

TEST(ScratchPool, NeverGivesTooLittleAndReplacesWhatIsTooSmall) {
  ScratchPool pool;
  pool.give_back(pool.take(10));
  EXPECT_GE(pool.take(20).numel(), 20);
  // The one of 10 bytes is gone; a pool that kept it would grow with every new size.
  const at::Tensor other = pool.take(5);
  EXPECT_EQ(other.numel(), 5);
}

TEST(Endpoint, RemembersTheFirstFailure) {
  Endpoint endpoint{GlooOptions()};
  endpoint.check_alive();
  endpoint.fail("first");
  endpoint.fail("second");
  try {
    endpoint.check_alive();
    FAIL() << "no error";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("earlier failure: first"), std::string::npos);
  }
}

}  // namespace
}  // namespace ppfsdp::gloo
