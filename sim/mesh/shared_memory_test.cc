#include "sim/mesh/shared_memory.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>

namespace ppfsdp::sim {
namespace {

c10::StorageImpl& storage_of(const at::Tensor& tensor) {
  return *tensor.storage().unsafeGetStorageImpl();
}

SharedMemory four_sevens() {
  SharedMemory memory(4 * sizeof(float));
  std::fill_n(reinterpret_cast<float*>(memory.data()), 4, 7.0F);
  return memory;
}

// With a copy for each, the memory of a simulated mesh would grow with the square of its ranks.
TEST(SharedMemory, lies_under_several_tensors_without_a_copy) {
  const SharedMemory memory = four_sevens();
  const at::Tensor a = at::empty({4}), b = at::empty({2});
  memory.put_under(storage_of(a), a.nbytes());
  memory.put_under(storage_of(b), b.nbytes());
  EXPECT_EQ(a.const_data_ptr(), memory.data());
  EXPECT_EQ(b.const_data_ptr(), memory.data());
  EXPECT_EQ(a.storage().nbytes(), 4 * sizeof(float));
  EXPECT_EQ(b.storage().nbytes(), 2 * sizeof(float));
  EXPECT_EQ(b[1].item<float>(), 7);
}

// One rank's write must not reach another's tensor.
TEST(SharedMemory, a_write_goes_to_a_copy) {
  const SharedMemory memory = four_sevens();
  const at::Tensor a = at::empty({4}), b = at::empty({4});
  memory.put_under(storage_of(a), a.nbytes());
  memory.put_under(storage_of(b), b.nbytes());
  const at::Tensor view = a.narrow(0, 1, 2);
  view.fill_(1);
  EXPECT_EQ(a[0].item<float>(), 7);
  EXPECT_EQ(a[1].item<float>(), 1);
  EXPECT_EQ(b[1].item<float>(), 7);
  EXPECT_EQ(b.const_data_ptr(), memory.data());
}

// The last of the storages still reads what was shared, and may take it over.
TEST(SharedMemory, lives_as_long_as_one_of_its_storages) {
  std::optional<SharedMemory> memory(four_sevens());
  const void* data = memory->data();
  const at::Tensor a = at::empty({4});
  {
    const at::Tensor b = at::empty({4});
    memory->put_under(storage_of(a), a.nbytes());
    memory->put_under(storage_of(b), b.nbytes());
  }
  memory.reset();
  EXPECT_EQ(a[3].item<float>(), 7);
  a.fill_(2);
  EXPECT_EQ(a.const_data_ptr(), data);
  EXPECT_EQ(a[3].item<float>(), 2);
}

}  // namespace
}  // namespace ppfsdp::sim
