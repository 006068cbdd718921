// vLLM's SimpleCPUOffloadConnector: the host has blocks as the device has them, with the same
// groups, keys and look-up, and copies go block by block (rules 44 to 50 of
// reference/caches/vllm.md; v1/simple_kv_offload/manager.py and worker.py). A step:
//
//   look_up()       the host's joint hit behind a waiting request's local one, which pins blocks
//   allocated()     the request has its blocks: pins go, and the hit is to be loaded
//   end_schedule()  decides stores; loads start
//   end_forward()   stores start, which wait for the forward
//   land()          the oldest copy of a direction is done
//   settle()        the scheduler hears which copies are done; stored blocks get their keys
//
// Both ends of a copy have a reference until it is settled. Copies are those of one step: one to
// the host and one to the device. Host blocks have numbers in the same memory, after the pool's.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <span>
#include <vector>

#include "cache_sim/policies/vllm/block_manager.hpp"
#include "cache_sim/policies/vllm/label_blocks.hpp"

namespace lockstep::cache_sim {

class SimpleTier {
 public:
  using RequestId = std::uint64_t;  ///< BlockRequest::offload

  /// Copies that are settled together: of a load those of one request, of a store all.
  struct Part {
    RequestId request = 0;  ///< that loads
    std::vector<BlockCopy> copies;
  };
  /// The copies of a step in one direction.
  struct Job {
    std::vector<Part> parts;
    bool landed = false;
    bool is_abandoned = false;  ///< a store from before a reset, which publishes nothing
  };
  using Columns = std::vector<std::vector<BlockId>>;  ///< by group
  struct Row {
    const BlockRequest* request;
    std::int64_t computed;  ///< tokens before this step
    bool is_first;          ///< of the request's rows
  };

  /// The device's manager must outlive the tier.
  explicit SimpleTier(BlockManager& device);
  /// Copies are told to these labels and done in this memory, which must outlive the tier's last
  /// operation.
  void follow(LabelBlocks& labels) { labels_ = &labels; }
  void follow_numbers(BlockMemory& numbers) { numbers_ = &numbers; }

  /// Tokens after the first `local`, which are whole blocks of all groups.
  std::int64_t look_up(const BlockRequest& request, std::int64_t local);
  /// The request has blocks, and the first `external` tokens of the hit are to be loaded behind the
  /// first `local`.
  void allocated(const BlockRequest& request, std::int64_t local, std::int64_t external);
  bool is_loaded(RequestId request) const { return loaded_.contains(request); }
  /// The load has been used, or given up.
  bool take_loaded(RequestId request) { return loaded_.erase(request) > 0; }
  /// Before the request's blocks are given back.
  void finish(const BlockRequest& request);
  void preempt(const BlockRequest& request);

  void end_schedule(std::span<const Row> rows, const std::vector<BlockManager::Handoff>& handoffs);
  void end_forward();
  /// False where no copy of that direction is in flight.
  bool land(bool to_host);
  /// Appends the requests whose loads have ended; returns the number of copies.
  std::int64_t settle(std::vector<RequestId>& loaded);
  /// Stores in flight will publish nothing. Where no copy is in flight, the host forgets its keys.
  /// Returns how many blocks had some.
  std::int64_t reset();

  const BlockPool& host() const { return host_.pool(); }
  /// The number of a host block in the memory.
  BlockId in_memory(BlockId block) const { return first_host_block_ + block; }
  BlockId on_host(BlockId in_memory) const { return in_memory - first_host_block_; }
  BlockId cursor() const { return cursor_; }
  /// Host blocks behind the local hit of requests that have no blocks yet.
  const std::map<RequestId, Columns>& hits() const { return hits_; }
  /// In flight, or landed and not settled.
  const std::deque<Job>& stores() const { return stores_; }
  const std::deque<Job>& loads() const { return loads_; }
  /// To start with the end of this step.
  const std::vector<Part>& new_loads() const { return new_loads_; }
  const std::vector<BlockCopy>& new_stores() const { return new_stores_; }
  /// Of requests that have ended since the last step.
  const std::vector<BlockCopy>& ended_stores() const { return ended_stores_; }

 private:
  /// Of attention, the columns that were stored or passed over, by group.
  using Progress = std::vector<std::int64_t>;

  bool is_storable(BlockId block) const;
  void store(BlockId block, std::vector<BlockCopy>& stores);
  void store_handoffs(const std::vector<BlockManager::Handoff>& handoffs);
  void store_confirmed(const BlockRequest& request, std::int64_t computed, Progress& progress,
                       std::vector<BlockCopy>& stores);
  BlockId unstored_tail(const BlockRequest& request) const;
  void store_next_evicted();
  void unpin(RequestId request);
  void start(Job job, std::deque<Job>& jobs);
  void land(Job& job);
  void publish(const BlockCopy& copy);
  void release_store(const Job& job);
  void release_load(const Part& part);

  const BlockRules& rules_;
  BlockPool& device_;
  BlockManager host_;
  BlockId first_host_block_;
  LabelBlocks* labels_ = nullptr;   // null: nobody asks what blocks hold
  BlockMemory* numbers_ = nullptr;  // null: there are none
  std::map<RequestId, Columns> hits_;
  std::map<RequestId, Progress> requests_;  // of eager stores: those that have blocks
  std::set<BlockId> in_flight_;             // of the device: eager stores that are not settled
  BlockId cursor_ = kNullBlock;  // of lazy stores: the last free block that was looked at
  std::int64_t lazy_target_;
  bool flushes_ = false;                              // a request was preempted in this schedule
  std::vector<BlockCopy> ended_stores_, new_stores_;  // of requests that have ended; of this step
  std::vector<Part> new_loads_;
  std::deque<Job> stores_, loads_;
  std::set<RequestId> loaded_;
};

}  // namespace lockstep::cache_sim
