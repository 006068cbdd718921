// The oracle of the CPU tier of `vllm-align`: OffloadingConnectorScheduler and CPUOffloadingManager
// of vLLM 0.33 (vllm.md, 28 to 37), over plain lists. It knows which copies there are, not what
// they bring: a copy waits for the next step, flies, or has landed and is not settled.
//
//   here       vLLM                          what it is
//   Chunk      ChunkStatus                   references and place of one chunk; -1: being written
//   rank       LRUCachePolicy._ranks         the order of eviction: the least first
//   next       next_stored_chunk_idx         by group, the first chunk that was not offered yet
//   Copy       TransferJob(Status)           a job: its keys, and the blocks that it reads
//   fences     _block_id_to_pending_jobs     jobs that have to land before the block has a new
//   owner loading    _chunks_being_loaded          keys of loads that are not settled
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace lockstep::reference {

inline std::int64_t ceiling(std::int64_t a, std::int64_t unit) {
  return (a + unit - 1) / unit;
}

class VllmOffload {
 public:
  using Count = std::int64_t;
  using Number = int;
  using Key = std::pair<int, Number>;  ///< group and hash
  using Id = Count;                    ///< of a request

  struct Group {
    bool holds_states;
    Count block;
  };
  /// A request as the scheduler shows it.
  struct Shown {
    const std::vector<Number>& hashes;
    Count tokens, prompt;                      ///< known, and of the prompt
    Count computed;                            ///< when this step's forward has run
    std::vector<std::vector<Number>> columns;  ///< by group
  };
  struct Scheduled {
    Id id;
    Shown request;
  };
  /// boundary_state_offloads: a block that keeps the state after so many tokens.
  struct Offer {
    Id id;
    int group;
    Number block;
    Count tokens;
  };

  VllmOffload(std::vector<Group> groups, Count hash_block, Count chunks, Count blocks_per_chunk,
              bool has_disk);

  void add(Id id) { requests_[id].next.assign(groups_.size(), 0); }
  void remove(Id id) { requests_.erase(id); }
  /// get_num_new_matched_tokens(); none: ask again later.
  std::optional<Count> matched(Id id, const Shown& request, Count computed);
  /// update_state_after_alloc() of a load.
  void load(Id id, const Shown& request, Count computed, Count external);
  void finish(Id id, const Shown& request, bool is_aborted);
  void preempt(Id id) { preempted_.push_back(id); }
  /// build_connector_meta(), then the worker's part of the step before its forward.
  void build(const std::vector<Scheduled>& rows, const std::vector<Scheduled>& offering,
             const std::vector<Offer>& offers, const std::set<Number>& allocated);
  bool land(bool is_load);
  /// update_connector_output(): the number of copies, and the requests whose loads have come.
  std::pair<Count, std::vector<Id>> settle();
  /// reset_cache(): the number of chunks that there were.
  Count reset();
  /// Appends the numbers that contents= covers.
  void tell(std::vector<Count>& numbers) const;

  // The disk (vllm_disk.cpp).
  bool has_disk() const { return has_disk_; }
  /// Decided, or in flight.
  bool has_stores() const { return !waiting_stores_.empty() || !stores_.empty(); }
  /// A request that was turned away does not ask again.
  void leave(Id id);
  bool end_transfer(bool is_promotion, bool fails);
  bool has_ended_transfers() const;
  Count take_noted() { return std::exchange(noted_, 0); }
  Count promoted() const { return promoted_; }
  Count empty_disk();

 private:
  struct Chunk {
    Count references = -1;
    Number place = 0;
    std::pair<Count, Count> rank;  ///< of the request, and the tokens before its end, negated
  };
  struct Request {
    std::vector<Count> next;
    std::set<Count> jobs;
    bool was_scheduled = false;
    std::set<Key> accessed;
    Count rank = 0, generation = 0;
    bool has_ended = false, is_told = false;
    std::vector<Number> hashes;  // from its end on, as the next two
    std::vector<std::vector<Number>> columns;
    Count tokens = 0;
  };
  struct Copy {
    Count job;
    Id id;
    bool is_load;
    std::vector<Key> keys;
    std::vector<Number> fenced, fenced_later;
    bool landed = false;
  };

  struct Transfer {
    bool is_promotion;
    std::vector<Key> keys;
    bool has_ended = false, has_failed = false;
  };

  Count size_of(int group) const {
    return groups_[static_cast<std::size_t>(group)].block * blocks_per_chunk_;
  }
  Key key(const std::vector<Number>& hashes, int group, Count tokens);
  const Chunk* chunk(const Key& key) const;
  std::optional<Count> whole_chunks(Id id, const Shown& request, Count computed);
  std::optional<Count> whole_chunks(Id id, const Shown& request, Count computed, Count end);
  std::pair<Count, bool> look(Id id, const Shown& request, int group, Count first, Count last);
  bool has_tails() const;
  void access(Request& request, const std::vector<Key>& keys);
  Count rank_of(Request& request);
  std::optional<std::vector<Key>> prepare_store(Request& request, const std::vector<Key>& keys);
  std::optional<std::vector<Key>> reserve(Request& request, const std::vector<Key>& keys,
                                          const std::vector<Key>& spared);
  bool make_room(Count wanted, const std::vector<Key>& spared);
  Copy& store(Id id, std::vector<Key> keys, std::vector<Copy>& made);
  void store_offers(const Scheduled& row, const std::vector<Offer>& offers,
                    const std::set<Number>& allocated, std::vector<Copy>& made,
                    std::set<Count>& flushed);
  void store_tail(const Scheduled& row, const std::vector<Offer>& offers, std::vector<Copy>& made);
  void store_chunks(Id id, const std::vector<Number>& hashes,
                    const std::vector<std::vector<Number>>& columns, Count tokens,
                    std::vector<Copy>& made);
  void work(const std::vector<Copy>& made, const std::set<Count>& flushed);
  // The disk.
  void poll();
  const Chunk* lookup(Id id, const Shown& request, const Key& key);
  void submit();
  void cascade(const std::vector<Key>& keys);
  void drain();
  void tell_disk(std::vector<Count>& numbers) const;

  std::vector<Group> groups_;
  Count hash_block_, chunk_count_, blocks_per_chunk_;
  std::map<Key, Chunk> chunks_;
  std::map<Key, Count> position_;  // tokens up to the end of a key
  std::vector<Number> free_places_;
  Count places_used_ = 0, next_rank_ = 0, generation_ = 0;
  std::map<Id, Request> requests_;
  std::vector<Id> preempted_, finished_;
  Count jobs_ = 0, first_valid_job_ = 1;
  std::map<Number, std::set<Count>> fences_;
  std::set<Key> loading_;
  std::set<Count> flushed_by_reset_;
  std::vector<Copy> waiting_stores_, waiting_loads_, stores_, loads_;
  // The disk.
  bool has_disk_;
  std::set<Key> disk_;
  std::vector<Transfer> transfers_;
  std::vector<std::pair<Id, Key>> wanted_;
  bool was_polled_ = false;
  Count noted_ = 0, promoted_ = 0;
  std::set<Count> fence_;  // jobs
};

}  // namespace lockstep::reference
