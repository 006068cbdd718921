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
// A chunk's blocks have numbers in the same memory, after those of the pool.
#pragma once

#include <compare>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <tuple>
#include <vector>

#include "cache_sim/policies/vllm/block_manager.hpp"
#include "cache_sim/policies/vllm/label_blocks.hpp"

namespace lockstep::cache_sim {

/// A group's part of a prefix: the hash at its end, and the tokens that the hash stands for.
struct ChunkKey {
  std::uint32_t group = 0;
  KeyId key = 0;
  std::uint32_t tokens = 0;
  auto operator<=>(const ChunkKey&) const = default;
};

/// The chunks of the CPU tier: CPUOffloadingManager with its LRU policy (rules 34 and 35). A chunk
/// has room for `blocks_per_chunk` blocks of any group. Between the decision to store it and the
/// settlement of that copy it is written: it has its key, and nobody may load it.
class CpuChunks {
 public:
  /// The request's, negated tokens and group: the least is evicted first.
  using Rank = std::tuple<std::int64_t, std::int64_t, std::uint32_t>;
  struct Chunk {
    std::uint32_t index;
    std::int32_t readers = -1;  ///< loads that read it; -1: it is being written
    Rank rank;
    bool is_ready() const { return readers >= 0; }
  };
  /// The chunks that a request has accessed, which are ranked anew when it ends.
  struct Access {
    std::uint64_t generation = 0;  ///< of the cache that the rest is about
    std::int64_t rank = 0;         ///< 0: none yet
    std::set<ChunkKey> seen;
  };
  struct Stores {
    std::vector<ChunkKey> keys;  ///< of those offered, the ones without a chunk
    std::vector<std::uint32_t> chunks;
  };

  CpuChunks(std::int64_t count, bool pins_loads) : count_(count), pins_loads_(pins_loads) {}

  /// Null where there is no chunk of that key.
  const Chunk* find(const ChunkKey& key) const {
    const auto found = chunks_.find(key);
    return found == chunks_.end() ? nullptr : &found->second;
  }
  const std::map<ChunkKey, Chunk>& all() const { return chunks_; }
  std::int64_t free_count() const {
    return std::ssize(free_) + count_ - static_cast<std::int64_t>(used_);
  }

  /// Chunks to read from; each key has one.
  std::vector<std::uint32_t> begin_load(std::span<const ChunkKey> keys, Access& access);
  void end_load(std::span<const ChunkKey> keys);
  /// None where there is no room.
  std::optional<Stores> begin_store(std::span<const ChunkKey> keys, Access& access);
  void end_store(std::span<const ChunkKey> keys);
  /// The request has ended: what it accessed is the newest, heads before tails.
  void finish(Access& access);
  void reset();

 private:
  std::int64_t rank_of(Access& access);
  void access(std::span<const ChunkKey> keys, Access& access);
  bool evict(std::int64_t shortfall, std::span<const ChunkKey> offered);

  std::int64_t count_;
  bool pins_loads_;  // false: a planted defect
  std::map<ChunkKey, Chunk> chunks_;
  std::vector<std::uint32_t> free_;  // the last one is taken first
  std::uint32_t used_ = 0;           // chunks from here on have never been used
  std::int64_t newest_ = 0;          // rank
  std::uint64_t generation_ = 1;
};

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
  /// All chunks are gone at once; copies in flight go on.
  void reset();

  const CpuChunks& chunks() const { return chunks_; }
  BlockId host_block(std::uint32_t chunk, std::int64_t column) const;
  /// In flight, or landed and not settled.
  const std::deque<Job>& stores() const { return stores_; }
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
  std::optional<std::int64_t> look_up_chunks(const BlockRequest& request, std::int64_t local) const;
  std::optional<std::int64_t> find_in_group(const std::vector<KeyId>& keys, std::uint32_t group,
                                            std::int64_t begin, std::int64_t end) const;
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
  void land_up_to(std::deque<Job>& jobs, const std::set<JobId>& ids);
  void land(Job& job);
  void end_job(const Job& job);

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
  std::set<RequestId> loaded_;
};

}  // namespace lockstep::cache_sim
