#include "src/checkpoint/gather_texts.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include "sim/mesh/world.h"
#include "src/comm/runtime.h"

namespace ppfsdp::checkpoint {
namespace {

// Texts of different lengths, empty ones and bytes of any value: a shifted or cut text would name
// the wrong thing on the wrong rank.
TEST(GatherTexts, EveryRankGetsEveryText) {
  const std::vector<std::string> texts = {"", std::string("a\0b", 3), "longer than the others \xff",
                                          ""};
  sim::run_world(4, {.schedule = sim::Schedule::kRandom}, [&](comm::Runtime& runtime) {
    EXPECT_EQ(gather_texts(runtime, texts[runtime.rank()]), texts);
    EXPECT_EQ(gather_texts(runtime, ""), std::vector<std::string>(4));
  });
}

// What one rank alone met must end all of them, with the same words.
TEST(AgreeOnFaults, OneRanksFaultIsEveryRanks) {
  const auto error_of = [](comm::Runtime& runtime, const std::string& fault) -> std::string {
    try {
      agree_on_faults(runtime, fault);
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    return "";
  };
  sim::run_world(3, {}, [&](comm::Runtime& runtime) {
    EXPECT_EQ(error_of(runtime, ""), "");
    EXPECT_EQ(error_of(runtime, runtime.rank() == 1 ? "no disk" : ""), "on rank 1: no disk");
    EXPECT_EQ(error_of(runtime, "no disk"), "no disk");
  });
}

}  // namespace
}  // namespace ppfsdp::checkpoint
