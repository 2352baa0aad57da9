#include "sim/mesh/world_state.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "sim/mesh/poison.h"
#include "src/comm/communicator.h"

namespace ppfsdp::sim {
namespace {

std::vector<int> all_ranks(int n) {
  std::vector<int> ranks(n);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

World::World(int n, const WorldOptions& options)
    : options_(options),
      ranks_(n),
      scheduler_(n, make_policy(options.schedule, options.seed, n), *this),
      world_group_(add_group("world", all_ranks(n))) {
  for (int rank = 0; rank < n; ++rank) ranks_[rank].compute = &add_stream(rank, "compute", true);
}

World::~World() = default;

GroupPtr World::add_group(std::string name, std::vector<int> ranks) {
  auto group = std::make_shared<Group>(std::move(name), std::move(ranks));
  groups_.push_back(group);
  return group;
}

StreamQueue& World::add_stream(int rank, const std::string& name, bool is_compute) {
  return *streams_.emplace_back(std::make_unique<StreamQueue>(*this, rank, name, is_compute));
}

void World::check_caller(int rank, const char* what) const {
  TORCH_CHECK(!scheduler_.in_task(), what, " of rank ", rank,
              ": called from a closure that a stream runs; closures may issue LibTorch operations "
              "but neither communicate nor use streams and events");
  TORCH_CHECK(
      scheduler_.running() == rank, what, " of rank ", rank, ": called ",
      scheduler_.running() < 0
          ? std::string("outside run_world")
          : fmt::format("by rank {}; each rank must use its own runtime", scheduler_.running()));
}

void World::wake(ActorId id) {
  if (id < size()) {
    scheduler_.set_ready(id, true);
  } else {
    streams_[id - size()]->advance();
  }
}

void World::set_error_seen(int rank, const std::exception_ptr& error) {
  ranks_[rank].seen_errors.push_back(error);
}

void World::wait_for(int rank, const SimEventPtr& event) {
  ranks_[rank].waits_for_event = event;
  event->add_waiter(rank);
  while (!event->done() && !scheduler_.ending()) scheduler_.block(rank);
  ranks_[rank].waits_for_event = nullptr;
}

void World::wait_for(int rank, const std::shared_ptr<Operation>& operation) {
  ranks_[rank].waits_for_operation = operation;
  while (!operation->done() && !scheduler_.ending()) scheduler_.block(rank);
  ranks_[rank].waits_for_operation = nullptr;
}

void World::add_in_flight(int rank, Operation& operation, int index) {
  if (options_.poison) ranks_[rank].in_flight.push_back({&operation, index});
}

void World::remove_in_flight(int rank, const Operation& operation) {
  std::erase_if(ranks_[rank].in_flight,
                [&](const InFlight& entry) { return entry.operation == &operation; });
}

void World::poison_in_flight(int rank) {
  // Once is enough: only the operation itself may write there until it has run.
  for (const auto& [operation, index] : std::exchange(ranks_[rank].in_flight, {})) {
    operation->poison_outputs(index);
  }
}

void World::put_poison_under(c10::StorageImpl& storage, size_t bytes) {
  if (poison_.empty() || poison_.back().size() < bytes) {
    // Doubled at least, so that there are few.
    const size_t size = poison_.empty() ? bytes : std::max(bytes, 2 * poison_.back().size());
    poison(poison_.emplace_back(size).data(), size);
  }
  poison_.back().put_under(storage, bytes);
}

bool World::is_on_poison(const c10::StorageImpl& storage) const {
  return std::ranges::any_of(
      poison_, [&](const SharedMemory& memory) { return memory.data() == storage.data(); });
}

std::string World::describe_wait(int rank) const {
  const RankState& state = ranks_[rank];
  if (state.waits_for_operation != nullptr) {
    return state.waits_for_operation->where() + state.waits_for_operation->describe_missing();
  }
  const StreamQueue& stream = state.waits_for_event->stream();
  return fmt::format("an event of stream '{}', which is at {}", stream.name(),
                     stream.describe_head());
}

std::exception_ptr World::stuck() {
  std::vector<std::string> stuck_streams;
  bool all_returned = true;
  for (int rank = 0; rank < size(); ++rank) all_returned &= scheduler_.has_returned(rank);
  for (const auto& stream : streams_) {
    const auto& seen = ranks_[stream->rank()].seen_errors;
    if (stream->error() != nullptr && std::ranges::find(seen, stream->error()) == seen.end()) {
      scheduler_.fail(stream->rank(), stream->error());
      return nullptr;
    }
    if (!stream->empty()) {
      stuck_streams.push_back(fmt::format("stream '{}' of rank {} is at {}", stream->name(),
                                          stream->rank(), stream->describe_head()));
    }
  }
  if (all_returned) {
    if (stuck_streams.empty()) return nullptr;
    return std::make_exception_ptr(comm::CommError(
        fmt::format("all ranks have returned, but work is left that can never run: {}",
                    fmt::join(stuck_streams, "; "))));
  }
  // Ranks that wait for the same are told together.
  std::vector<std::pair<std::string, std::vector<int>>> waits;
  for (int rank = 0; rank < size(); ++rank) {
    std::string text =
        scheduler_.has_returned(rank) ? "returned" : "waiting for " + describe_wait(rank);
    const auto same =
        std::ranges::find(waits, text, &std::pair<std::string, std::vector<int>>::first);
    if (same != waits.end()) {
      same->second.push_back(rank);
    } else {
      waits.emplace_back(std::move(text), std::vector<int>{rank});
    }
  }
  std::vector<std::string> lines;
  for (const auto& [text, ranks] : waits) {
    lines.push_back(
        fmt::format("rank{} {}: {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "), text));
  }
  return std::make_exception_ptr(
      comm::CommError(fmt::format("deadlock: no rank can go on. {}", fmt::join(lines, "; "))));
}

void World::clear() {
  for (const auto& stream : streams_) stream->clear();
  for (const std::weak_ptr<Group>& entry : groups_) {
    if (const GroupPtr group = entry.lock()) {
      group->collectives.clear();
      group->channels.clear();
    }
  }
  for (RankState& rank : ranks_) rank = RankState{.compute = rank.compute};
}

}  // namespace ppfsdp::sim
