// The facts of NCCL 2.28's interface that the backend and the fake build on, against whichever
// <nccl.h> this build has: our own declarations in a CPU build, NCCL's header in a CUDA build. Were
// one of them wrong in ours, a backend tested here would call the real library wrongly.
#include <gtest/gtest.h>
#include <nccl.h>

#include <climits>
#include <cstddef>
#include <type_traits>

namespace ppfsdp::nccl {
namespace {

static_assert(NCCL_VERSION(2, 28, 9) == 22809);
static_assert(sizeof(ncclUniqueId) == 128 && NCCL_UNIQUE_ID_BYTES == 128);
static_assert(NCCL_CONFIG_UNDEF_INT == INT_MIN && NCCL_SPLIT_NOCOLOR == -1);

static_assert(ncclSuccess == 0 && ncclUnhandledCudaError == 1 && ncclSystemError == 2 &&
              ncclInternalError == 3 && ncclInvalidArgument == 4 && ncclInvalidUsage == 5 &&
              ncclRemoteError == 6 && ncclInProgress == 7 && ncclNumResults == 8);
static_assert(ncclInt8 == 0 && ncclChar == 0 && ncclUint8 == 1 && ncclInt32 == 2 && ncclInt == 2 &&
              ncclUint32 == 3 && ncclInt64 == 4 && ncclUint64 == 5 && ncclFloat16 == 6 &&
              ncclHalf == 6 && ncclFloat32 == 7 && ncclFloat == 7 && ncclFloat64 == 8 &&
              ncclDouble == 8 && ncclBfloat16 == 9 && ncclFloat8e4m3 == 10 &&
              ncclFloat8e5m2 == 11 && ncclNumTypes == 12);
static_assert(ncclSum == 0 && ncclProd == 1 && ncclMax == 2 && ncclMin == 3 && ncclAvg == 4 &&
              ncclNumOps == 5 && ncclMaxRedOp == INT_MAX);
static_assert(ncclScalarDevice == 0 && ncclScalarHostImmediate == 1);
static_assert(sizeof(ncclResult_t) == 4 && sizeof(ncclDataType_t) == 4 &&
              sizeof(ncclRedOp_t) == 4 && sizeof(ncclScalarResidence_t) == 4);

static_assert(std::is_standard_layout_v<ncclConfig_t> && sizeof(ncclConfig_t) == 80);
static_assert(offsetof(ncclConfig_t, size) == 0 && offsetof(ncclConfig_t, magic) == 8 &&
              offsetof(ncclConfig_t, version) == 12 && offsetof(ncclConfig_t, blocking) == 16 &&
              offsetof(ncclConfig_t, cgaClusterSize) == 20 &&
              offsetof(ncclConfig_t, minCTAs) == 24 && offsetof(ncclConfig_t, maxCTAs) == 28 &&
              offsetof(ncclConfig_t, netName) == 32 && offsetof(ncclConfig_t, splitShare) == 40 &&
              offsetof(ncclConfig_t, trafficClass) == 44 &&
              offsetof(ncclConfig_t, commName) == 48 &&
              offsetof(ncclConfig_t, collnetEnable) == 56 &&
              offsetof(ncclConfig_t, CTAPolicy) == 60 &&
              offsetof(ncclConfig_t, shrinkShare) == 64 && offsetof(ncclConfig_t, nvlsCTAs) == 68 &&
              offsetof(ncclConfig_t, nChannelsPerNetPeer) == 72 &&
              offsetof(ncclConfig_t, nvlinkCentricSched) == 76);
static_assert(std::is_same_v<cudaStream_t, struct CUstream_st*>);
static_assert(std::is_same_v<ncclComm_t, struct ncclComm*>);

TEST(NcclHeader, ConfigStartsAsNcclExpectsIt) {
  const ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  EXPECT_EQ(config.size, 80u);
  EXPECT_EQ(config.magic, 0xcafebeefu);
  EXPECT_EQ(config.version, static_cast<unsigned>(NCCL_VERSION_CODE));
  for (const int field :
       {config.blocking, config.cgaClusterSize, config.minCTAs, config.maxCTAs, config.splitShare,
        config.trafficClass, config.collnetEnable, config.CTAPolicy, config.shrinkShare,
        config.nvlsCTAs, config.nChannelsPerNetPeer, config.nvlinkCentricSched}) {
    EXPECT_EQ(field, INT_MIN);
  }
  EXPECT_EQ(config.netName, nullptr);
  EXPECT_EQ(config.commName, nullptr);
}

}  // namespace
}  // namespace ppfsdp::nccl
