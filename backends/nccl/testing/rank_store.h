#pragma once

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

namespace ppfsdp::nccl::testing {

/// One rank's connection to a store that ranks of this process share. Cut, every call of it and of
/// its clones throws: as seen by the rank the store is gone, and as seen by the others the rank.
class RankStore final : public c10d::Store {
 public:
  explicit RankStore(c10::intrusive_ptr<c10d::Store> shared)
      : RankStore(std::move(shared), std::make_shared<std::atomic<bool>>(false)) {}
  /// A clone: whether it is cut is shared too.
  RankStore(c10::intrusive_ptr<c10d::Store> shared, std::shared_ptr<std::atomic<bool>> cut)
      : shared_(std::move(shared)), cut_(std::move(cut)) {}

  void cut() { *cut_ = true; }

  c10::intrusive_ptr<c10d::Store> clone() override;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override;
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override;

 private:
  c10d::Store& store() const;

  const c10::intrusive_ptr<c10d::Store> shared_;
  const std::shared_ptr<std::atomic<bool>> cut_;
};

}  // namespace ppfsdp::nccl::testing
