#include "backends/nccl/testing/rank_store.h"

#include <stdexcept>

namespace ppfsdp::nccl::testing {

c10d::Store& RankStore::store() const {
  if (*cut_) throw std::runtime_error("the connection to the store is cut");
  return *shared_;
}

c10::intrusive_ptr<c10d::Store> RankStore::clone() {
  return c10::make_intrusive<RankStore>(shared_, cut_);
}
void RankStore::set(const std::string& key, const std::vector<uint8_t>& value) {
  store().set(key, value);
}
std::vector<uint8_t> RankStore::compareSet(const std::string& key,
                                           const std::vector<uint8_t>& expected,
                                           const std::vector<uint8_t>& desired) {
  return store().compareSet(key, expected, desired);
}
std::vector<uint8_t> RankStore::get(const std::string& key) { return store().get(key); }
int64_t RankStore::add(const std::string& key, int64_t value) { return store().add(key, value); }
bool RankStore::deleteKey(const std::string& key) { return store().deleteKey(key); }
bool RankStore::check(const std::vector<std::string>& keys) { return store().check(keys); }
int64_t RankStore::getNumKeys() { return store().getNumKeys(); }
void RankStore::wait(const std::vector<std::string>& keys) { store().wait(keys); }
void RankStore::wait(const std::vector<std::string>& keys,
                     const std::chrono::milliseconds& timeout) {
  store().wait(keys, timeout);
}

}  // namespace ppfsdp::nccl::testing
