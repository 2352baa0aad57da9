// Shows that LibTorch's CUDA part, CUDA's headers and NCCL which the build found belong together,
// and that a program linked with them starts without a GPU and without a driver.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/ones.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <nccl.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string>

namespace {

// On a machine with GPUs they are hidden before CUDA first looks, so that the tests are the same
// there.
const int kHidden = setenv("CUDA_VISIBLE_DEVICES", "", 1);

// Wrong when NCCL's header comes from a later release than the library: calls would not be there.
TEST(LibTorchCuda, NcclLibraryIsAsNewAsItsHeader) {
  int version = 0;
  ASSERT_EQ(ncclGetVersion(&version), ncclSuccess);
  EXPECT_GE(version, NCCL_VERSION_CODE);
  EXPECT_GE(NCCL_VERSION_CODE, NCCL_VERSION(2, 28, 0));
}

// Wrong when CUDA's headers come from another major release than the library: structs would differ.
TEST(LibTorchCuda, CudaLibraryHasTheHeadersMajorVersion) {
  int version = 0;
  ASSERT_EQ(cudaRuntimeGetVersion(&version), cudaSuccess);
  EXPECT_EQ(version / 1000, CUDART_VERSION / 1000);
}

// Wrong when the linker leaves out libraries that register themselves: tensors on a GPU would have
// no operations.
TEST(LibTorchCuda, KernelsAreRegistered) {
  const c10::OperatorHandle product =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::mm", "");
  EXPECT_TRUE(product.hasKernelForDispatchKey(c10::DispatchKey::CUDA));
  void* linear_algebra = dlopen("libtorch_cuda_linalg.so", RTLD_LAZY | RTLD_NOLOAD);
  ASSERT_NE(linear_algebra, nullptr);
  dlclose(linear_algebra);
}

// Wrong when the CPU part and the CUDA part come from two LibTorches, each of which is then loaded.
TEST(LibTorchCuda, EachLibraryIsLoadedOnce) {
  std::map<std::string, std::set<std::string>> paths;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const std::size_t start = line.find('/');
    if (start == std::string::npos) continue;
    const std::filesystem::path path = line.substr(start);
    if (path.filename().string().starts_with("lib")) paths[path.filename()].insert(path);
  }
  for (const char* name : {"libc10.so", "libtorch_cpu.so", "libc10_cuda.so", "libtorch_cuda.so"}) {
    EXPECT_TRUE(paths.contains(name)) << name;
  }
  for (const auto& [name, places] : paths) EXPECT_EQ(places.size(), 1) << name;
}

// Wrong when looking for a GPU throws or ends the process where there is none, as Gloo's and the
// simulated mesh's processes would.
TEST(LibTorchCuda, WithoutAGpuNoneIsCountedAndUsingOneThrows) {
  ASSERT_EQ(kHidden, 0);
  EXPECT_EQ(c10::cuda::device_count(), 0);
  EXPECT_THROW(c10::cuda::device_count_ensure_non_zero(), c10::Error);
  EXPECT_THROW(at::ones({2}, c10::Device(c10::DeviceType::CUDA)), c10::Error);
  EXPECT_EQ(at::ones({2}).sum().item<float>(), 2);
}

}  // namespace
