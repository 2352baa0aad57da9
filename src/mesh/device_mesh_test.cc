#include "src/mesh/device_mesh.h"

#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sim/mesh/world.h"

namespace ppfsdp::mesh {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

// Wrong coordinates or groups would reduce gradients over the wrong ranks.
TEST(DeviceMesh, ThreeDimsHaveRowMajorCoordinatesAndGroups) {
  sim::run_world(12, {}, [](comm::Runtime& runtime) {
    const auto mesh = DeviceMesh::create(runtime, {2, 3, 2}, {"pp", "dp", "tp"});
    const int rank = runtime.rank();
    EXPECT_THAT(mesh->coordinates(), ElementsAre(rank / 6, rank / 2 % 3, rank % 2));
    EXPECT_EQ(mesh->size(), 12);
    EXPECT_EQ(mesh->size(-2), 3);
    const int base = rank - rank / 2 % 3 * 2;
    EXPECT_THAT(mesh->communicator(1).ranks(), ElementsAre(base, base + 2, base + 4));
    EXPECT_EQ(mesh->communicator(1).rank(), mesh->coordinate(1));

    // A sum over "dp" must hold exactly the ranks of that row.
    const auto value = at::full({1}, double(rank), at::kDouble);
    mesh->communicator(1).all_reduce(value, comm::ReduceOp::sum(), runtime.compute_stream());
    runtime.compute_stream().synchronize();
    EXPECT_EQ(value.item<double>(), 3 * base + 6);
  });
}

// A submesh that forgets the other coordinates would hand one replica's shards to another.
TEST(DeviceMesh, SubmeshKeepsTheOtherCoordinatesAndSharesGroups) {
  sim::run_world(12, {}, [](comm::Runtime& runtime) {
    const auto mesh = DeviceMesh::create(runtime, {2, 3, 2}, {"pp", "dp", "tp"});
    const auto sub = mesh->submesh({"pp", "tp"});
    const int column = runtime.rank() / 2 % 3 * 2;
    EXPECT_THAT(sub->ranks(), ElementsAre(column, column + 1, column + 6, column + 7));
    EXPECT_EQ(&sub->communicator(1), &mesh->communicator(2));
    EXPECT_EQ(sub->parent(), mesh);
    EXPECT_EQ(sub->str(), "DeviceMesh(pp=2, tp=2)");
    EXPECT_EQ(*sub, *mesh->submesh({"pp", "tp"}));
    EXPECT_FALSE(*sub == *mesh);
  });
}

// A wrong block, or one communicator a call, breaks reshard_after_forward = k.
TEST(DeviceMesh, BlocksAreConsecutiveAndMadeOnce) {
  sim::run_world(6, {}, [](comm::Runtime& runtime) {
    const auto mesh = DeviceMesh::create(runtime, {6});
    const auto& block = mesh->block_communicator(0, 3);
    const int first = runtime.rank() / 3 * 3;
    EXPECT_THAT(block->ranks(), ElementsAre(first, first + 1, first + 2));
    EXPECT_EQ(block->rank(), runtime.rank() % 3);
    EXPECT_EQ(block, mesh->block_communicator(0, 3));
    EXPECT_THAT(error_of([&] { mesh->block_communicator(0, 4); }), HasSubstr("blocks of 4 ranks"));
  });
}

// Bad shapes must be refused with the numbers that matter, not misplace ranks.
TEST(DeviceMesh, RefusesWhatDoesNotFit) {
  sim::run_world(4, {}, [](comm::Runtime& runtime) {
    const auto make = [&](std::vector<int64_t> shape, std::vector<std::string> names = {}) {
      return error_of([&] { DeviceMesh::create(runtime, shape, names); });
    };
    EXPECT_THAT(make({3}), HasSubstr("3 ranks, the world has 4"));
    EXPECT_THAT(make({int64_t{1} << 40, int64_t{1} << 40}), HasSubstr("more ranks than the world"));
    EXPECT_THAT(make({}), HasSubstr("no dims"));
    EXPECT_THAT(make({-4}), HasSubstr("must be positive"));
    EXPECT_THAT(make({2, 2}, {"dp"}), HasSubstr("1 dim names for 2 dims"));
    EXPECT_THAT(make({2, 2}, {"dp", "dp"}), HasSubstr("two dims are called 'dp'"));
    EXPECT_THAT(make({2, 2}, {"dp", ""}), HasSubstr("is empty"));
    const auto mesh = DeviceMesh::create(runtime, {2, 2}, {"dp", "tp"});
    EXPECT_THAT(error_of([&] { mesh->size(2); }), HasSubstr("dim 2 does not exist"));
    EXPECT_THAT(error_of([&] { mesh->submesh({"ep"}); }), HasSubstr("the names are dp, tp"));
    EXPECT_THAT(error_of([&] { mesh->submesh({"tp", "dp"}); }), HasSubstr("in this mesh's order"));
  });
}

}  // namespace
}  // namespace ppfsdp::mesh
