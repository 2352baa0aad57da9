#include "src/dtensor/spec.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "src/dtensor/dtensor.h"
#include "src/dtensor/testing.h"

namespace ppfsdp::dtensor {
namespace {

using testing::integers;
using testing::on_mesh;
using testing::S;

// Equal specs that are two objects would make every op miss its cache.
TEST(Spec, equal_specs_are_one_object) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const at::Tensor a = distribute_tensor(integers({3, 4}, 1), mesh, {S(0)});
    const at::Tensor b = distribute_tensor(integers({3, 4}, 2), mesh, {S(0)});
    EXPECT_EQ(spec_of(a), spec_of(b));
    EXPECT_NE(spec_of(a), spec_of(distribute_tensor(integers({3, 4}, 1), mesh, {S(1)})));
    EXPECT_EQ(spec_of(a), spec_of(a + b));
  });
}

// The specs of activations die every step; with new ids every step would plan every op anew. And an
// id that came back for another spec would run a plan for other shapes.
TEST(Spec, an_id_outlives_its_spec_and_is_never_reused) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    const auto id = [&](int64_t rows) {
      return spec_of(distribute_tensor(integers({rows, 4}, 1), mesh, {S(0)}))->id;
    };
    const uint64_t first = id(3);
    EXPECT_NE(id(4), first);
    EXPECT_EQ(id(3), first);
  });
  uint64_t last = 0;
  for (int i = 0; i < 3; ++i) {
    on_mesh({1}, [&](const mesh::DeviceMeshPtr& mesh) {  // perhaps at the same address
      const uint64_t id = spec_of(distribute_tensor(integers({3}, 1), mesh, {S(0)}))->id;
      EXPECT_NE(id, last);
      last = id;
    });
  }
}

// Sequences of every length would otherwise fill the table for as long as the mesh lives. What is
// in use keeps its id.
TEST(Spec, the_table_forgets_what_nothing_uses) {
  on_mesh({1}, [](const mesh::DeviceMeshPtr& mesh) {
    const auto spec = [&](int64_t rows) {
      return make_spec(mesh, {S(0)}, {rows, 4}, {4, 1}, at::kFloat);
    };
    const SpecPtr kept = spec(1);
    const uint64_t dropped = spec(2)->id;
    for (int64_t rows = 3; rows < 20000; ++rows) {
      spec(rows);
    }
    EXPECT_EQ(spec(1), kept);
    EXPECT_NE(spec(2)->id, dropped);
    EXPECT_EQ(spec(19999)->id, spec(19999)->id);
  });
}

TEST(Spec, says_what_it_is) {
  on_mesh({2}, [](const mesh::DeviceMeshPtr& mesh) {
    EXPECT_EQ(spec_of(distribute_tensor(integers({3, 4}, 1), mesh, {S(0)}))->str(),
              "[3, 4], Float, DeviceMesh(2), [Shard(0)]");
  });
}

}  // namespace
}  // namespace ppfsdp::dtensor
