// vLLM's OffloadingConnector with a CPU tier: which blocks of a step are stored, what a look-up
// finds behind the local hit, and which copies are in flight (rules 28 to 37 of
// reference/caches/vllm.md). Of the worker it has the order in which copies start. A step:
//
//   look_up()       what the tier has after a waiting request's local hit
//   load()          the request has its blocks; the copy to them starts when the schedule ends
//   end_schedule()  decides stores and which copies have to land before the forward; then copies
//                   start: the stores of the step before, and the loads of this one
//   land()          the oldest copy of a direction is done
//   settle()        the scheduler hears which copies are done
//
// With a disk behind the CPU tier (TieringOffloadingManager, rules 38 to 43) a look-up may start
// promotions, which are submitted by end_schedule(), and a store that is settled is copied on.
//
// A chunk's blocks have numbers in the same memory, after those of the pool.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "cache_sim/policies/vllm/block_manager.hpp"
#include "cache_sim/policies/vllm/label_blocks.hpp"
#include "cache_sim/policies/vllm/tiers/cpu_chunks.hpp"
#include "cache_sim/policies/vllm/tiers/disk_tier.hpp"
#include "reference/protocol/subject.hpp"

namespace lockstep::cache_sim {

class OffloadTier {
 public:
  using JobId = std::uint64_t;
  using RequestId = std::uint64_t;  ///< BlockRequest::offload

  /// Copies that start and land together.
  struct Job {
    JobId id = 0;
    RequestId request = 0;
    bool is_load = false;
    bool landed = false;
    std::vector<ChunkKey> keys;
    std::vector<BlockCopy> copies;
    std::int64_t tail = 0;        ///< tokens of each block that count; 0: all
    std::vector<BlockId> fenced;  ///< blocks that a later owner must not get before it has landed:
    std::vector<BlockId> fenced_at_end;  ///< at once, and when the request has ended
  };

  /// Rules must outlive the tier.
  explicit OffloadTier(const BlockRules& rules);
  /// Copies are told to these labels, which must outlive the tier's last operation.
  void follow(LabelBlocks& labels) { labels_ = &labels; }

  RequestId add();
  /// The request has done nothing.
  void forget(RequestId request) { requests_.erase(request); }
  /// It has asked, and will not come.
  void leave(RequestId request);
  /// Tokens after the first `local`, which are whole blocks; none: those that follow are in flight.
  std::optional<std::int64_t> look_up(const BlockRequest& request, std::int64_t local);
  /// The request has got blocks without being scheduled: those of a load.
  void note_blocks(const BlockRequest& request);
  /// Loads `external` tokens after the first `local` into the request's tables.
  void load(const BlockRequest& request, std::int64_t local, std::int64_t external);
  bool is_loaded(RequestId request) const { return loaded_.contains(request); }
  /// The load has been used, or given up.
  bool take_loaded(RequestId request) { return loaded_.erase(request) > 0; }
  /// Before the request's blocks are given back.
  void finish(const BlockRequest& request, bool is_aborted);
  void preempt(const BlockRequest& request) { preempted_.push_back(request.offload); }

  /// `rows`: in the order in which they were scheduled. `all`: every request that has blocks.
  void end_schedule(std::span<const BlockRequest* const> rows,
                    const std::map<RequestId, const BlockRequest*>& all,
                    const std::vector<BlockManager::Handoff>& handoffs,
                    const std::vector<BlockCopy>& copies);
  /// False where no copy of that direction is in flight.
  bool land(bool to_host);
  /// Appends the requests whose loads have ended; returns the number of copies.
  std::int64_t settle(std::vector<RequestId>& loaded);
  /// All chunks are gone at once; copies in flight go on, but those of the disk, which land.
  /// Returns the number of chunks.
  std::int64_t reset();

  /// Null where there is none.
  const DiskTier* disk() const { return disk_ ? &*disk_ : nullptr; }
  /// The oldest copy to the disk, or from it, is done or has failed; false where there is none.
  bool end_disk_copy(bool is_promotion, DiskTier::End end);
  /// Whether all copies of the disk have ended, and the next look-up takes note of that.
  bool sees_disk_copies() const;
  /// Whether a copy of the disk has ended and the manager has not taken note of it.
  bool has_ended_disk_copies() const;
  /// The number of copies of the disk that it has taken note of since the last call.
  std::int64_t take_noted() { return std::exchange(noted_, 0); }
  /// The number of chunks whose promotions look-ups have started.
  std::int64_t promoted() const { return promoted_; }
  /// The number of copies between the device and the host that were ever decided.
  JobId last_job() const { return last_job_; }
  /// The chunks on the CPU tier that are of the request's prefix, whatever group or length.
  std::vector<ChunkKey> chunks_of(const BlockRequest& request) const;
  /// The number of chunks on the disk, which are gone.
  std::int64_t empty_disk();

  const CpuChunks& chunks() const { return chunks_; }
  BlockId host_block(std::uint32_t chunk, std::int64_t column) const;
  /// In flight, or landed and not settled.
  const std::deque<Job>& stores() const { return stores_; }
  /// Of copies that were started; tokens of KV and states count for each group.
  SnapshotHost host() const;
  const std::deque<Job>& loads() const { return loads_; }
  /// To start with the next step, or with the end of this one.
  const std::vector<Job>& waiting() const { return waiting_; }
  const std::vector<Job>& new_loads() const { return new_loads_; }
  /// Whether the job is of the cache before the last reset.
  bool is_stale(const Job& job) const { return job.id < first_valid_; }

 private:
  struct Request {
    bool has_run = false;  // so that it has columns
    bool has_ended = false, is_ended_told = false;
    std::vector<std::size_t> seen;   // by group: columns that an earlier step knows
    std::vector<std::int64_t> next;  // by group: the chunk that is stored next
    std::set<JobId> jobs;
    CpuChunks::Access access;
    // From its end on.
    std::vector<KeyId> keys;
    std::vector<std::vector<BlockId>> columns;  // by group, of attention
    std::int64_t tokens = 0;
  };
  std::int64_t chunk_of(std::uint32_t group) const {
    return rules_.groups[group].block * rules_.blocks_per_chunk;
  }
  std::int64_t keyed_chunks(const std::vector<KeyId>& keys, std::uint32_t group) const {
    return std::ssize(keys) * rules_.hash_block / chunk_of(group);
  }
  ChunkKey key_at(const std::vector<KeyId>& keys, std::uint32_t group, std::int64_t tokens) const;
  std::optional<std::int64_t> look_up_chunks(const BlockRequest& request, std::int64_t local);
  std::optional<std::int64_t> look_up_chunks(const BlockRequest& request, std::int64_t local,
                                             std::int64_t most);
  std::optional<std::int64_t> find_in_group(const BlockRequest& request, std::uint32_t group,
                                            std::int64_t begin, std::int64_t end);
  bool is_being_loaded(const BlockRequest& request, std::int64_t local, std::int64_t hit) const;
  bool supports_tails() const;
  Job& add_job(RequestId id, std::vector<Job>& jobs);
  void note_row(const BlockRequest& row);
  void store_states(const BlockRequest& row, const std::vector<BlockManager::Handoff>& handoffs,
                    std::vector<Job>& jobs);
  void store_tail(const BlockRequest& row, const std::vector<BlockManager::Handoff>& handoffs,
                  std::vector<Job>& jobs);
  void store_prefix(RequestId id, const BlockRequest* row, std::vector<Job>& jobs);
  void fence(const std::vector<BlockId>& blocks, JobId job);
  void unfence(const std::vector<BlockId>& blocks, JobId job);
  void start(Job job);
  SnapshotHost::Copied what(const Job& job) const;
  void land_up_to(std::deque<Job>& jobs, const std::set<JobId>& ids);
  void land(Job& job);
  void end_job(const Job& job);
  // The disk.
  const CpuChunks::Chunk* find(const BlockRequest& request, const ChunkKey& key);
  const CpuChunks::Chunk* promote(const BlockRequest& request, const ChunkKey& key);
  std::optional<CpuChunks::Stores> begin_store(std::span<const ChunkKey> keys, Request& request);
  void note_disk_copies();
  void end_disk_step();
  void cascade(const Job& job);
  void land_cascade(const DiskTier::Job& job, DiskTier::End end);
  void land_promotion(DiskTier::Job& job);
  void drain_disk();
  template <class Use>
  void each_block(const DiskTier::Job& job, Use use) const;

  const BlockRules& rules_;
  CpuChunks chunks_;
  LabelBlocks* labels_ = nullptr;                          // null: nobody asks what blocks hold
  std::vector<std::uint32_t> attention_, states_, order_;  // groups
  std::map<RequestId, Request> requests_;
  RequestId last_request_ = 0;
  JobId last_job_ = 0, first_valid_ = 1;
  std::vector<RequestId> preempted_, ended_;  // since the last schedule
  std::set<BlockId> allocated_;               // in this schedule
  std::map<BlockId, std::set<JobId>> fences_;
  std::set<ChunkKey> being_loaded_;
  std::set<JobId> flush_;
  std::vector<Job> new_loads_, waiting_;
  std::deque<Job> stores_, loads_;
  SnapshotHost::Copied to_host_, to_device_;
  std::set<RequestId> loaded_;
  // The disk.
  std::optional<DiskTier> disk_;
  bool is_polled_ = false;  // in this step
  std::int64_t noted_ = 0, promoted_ = 0;
  std::set<JobId> reset_fence_;  // jobs in flight at a reset: no promotion before they are settled
};

}  // namespace lockstep::cache_sim
