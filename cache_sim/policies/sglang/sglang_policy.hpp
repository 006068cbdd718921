// The request side of SGLang's radix caches, 0.5.23: policies `radix` (attention alone) and
// `sglang-no-buffer` (one state slot a request, copied into the tree at chunk ends and donated at
// the finish). Rules: reference/caches/sglang.md, 1.2 and 1.7. sglang_rules.hpp says what
// older versions do otherwise; sglang_extra_buffer.cpp has requests with tracking slots.
#pragma once

#include <array>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cache_sim/policies/pools.hpp"
#include "cache_sim/policies/sglang/radix_tree.hpp"
#include "cache_sim/policies/sglang/sglang_options.hpp"
#include "cache_sim/policies/sglang/sglang_rules.hpp"
#include "reference/protocol/subject.hpp"

namespace lockstep::cache_sim {

/// States that the forward left behind on its way, to be stored later (the extra buffer, 1.8).
struct Tracking {
  /// A state that a decode step has written and whose result is not there.
  struct Launched {
    std::uint32_t slot;
    std::uint32_t size;
  };
  std::array<StateSlot, 2> slots;   ///< a lazy request has the second one only while it needs two
  std::uint32_t next = 0;           ///< the slot that is written next
  std::uint32_t last = 1;           ///< the slot that was written last; lazy: the one that is kept
  std::uint32_t last_size = 0;      ///< tokens that slots[last] stands for; 0: nothing to store
  std::uint32_t previous = 0;       ///< the slot that was written before that
  std::uint32_t previous_size = 0;  ///< tokens that slots[previous] stands for; lazy: 0
  std::vector<Launched> launched;   ///< lazy alone, in order
};

/// A running request.
struct RadixRequest {
  Name id;
  Name salt;
  Tokens known;  ///< prompt, outputs, and what extends brought
  std::uint32_t prompt_size = 0;
  std::uint32_t admitted = 0;  ///< tokens known at the admission: up to them it prefills
  std::uint32_t computed = 0;  ///< tokens whose KV and state exist, in the order of the forwards
  std::array<std::uint32_t, 2> in_flight{};  ///< ends of the extends whose results have not come
  std::uint32_t in_flight_count = 0;
  std::uint32_t owned = 0;   ///< tokens of the row that the tree owns ("prot")
  std::uint32_t branch = 0;  ///< the position of a state that its match would have used; 0: none
  NodeIndex locked;          ///< node at depth `owned`, none where nothing is locked
  bool state_locked = true;  ///< that lock's receipt
  NodeIndex reached;  ///< the node at which its match's KV ended, if it still has `reached_serial`
  std::uint64_t reached_serial = 0;
  StateSlot live;              ///< the running state
  Tracking tracking;           ///< extra buffer alone
  std::uint32_t inserted = 0;  ///< tokens that its checkpoints have inserted
  RequestWindow window;
  std::uint64_t awaits = 0;  ///< the newest load that its next forward reads from; 0: none
  StateSlot source;          ///< the state to copy into the live slot when that has landed
  bool arrives = false;      ///< another server still sends its first tokens
  RequestRow row;
  KvRuns kv;  ///< one slot per token of [0, allocated)
  KvTail kv_tail;
  std::uint32_t allocated = 0;
  bool verifying = false;  ///< drafts are computed and not yet accepted
  Tokens drafts;
  std::vector<std::int64_t> parents;  ///< of the drafts, where they are a tree
  std::uint32_t verified_inputs = 0;  ///< known tokens that the verification ran over
  std::vector<std::uint32_t> kept;    ///< the drafts that were accepted, by number from 1 on

  std::uint32_t in_flight_begin = 0;  ///< tokens before the first of those extends
  /// Tokens whose results are there: what the scheduler knows of.
  std::uint32_t committed() const { return in_flight_count == 0 ? computed : in_flight_begin; }
};

/// A request that a storage has been asked for, and that is not admitted yet.
struct WaitingRequest {
  std::uint64_t number = 0;
  std::string admission;      ///< as asked first, without `late=`
  PrefetchRef prefetch;       ///< null: none is in flight
  std::uint32_t matched = 0;  ///< tokens that the look-up before the last prefetch had found
  std::int64_t repeats = 0;   ///< look-ups since the first one
  bool waits = false;         ///< its deadline runs, from when it was first put off
  bool is_late = false;       ///< its deadline has passed
  StateSlot slot, source;     ///< a defect: of the copy for an earlier match
};

/// A state slot that a trace holds by name (tree verbs).
struct HeldSlot {
  Name name;
  StateSlot slot;
  Tokens tokens;
};

/// A lock that a trace holds by name.
struct HeldLock {
  Name name;
  NodeIndex node;
  std::uint32_t window_begin = 0;  ///< the first token of its prefix whose window it holds
};

/// The capabilities of all of SGLang's policies.
inline constexpr Capabilities kSglangCapabilities{
    Capability::tree, Capability::transfers, Capability::draft_trees, Capability::partial_finish};

/// The numbers of a policy's first KV slot and state slot; 0: those with which pools begin. Slots
/// before them are another server's, in the same LayerState.
struct FirstSlots {
  std::uint32_t kv = 0, state = 0;
};

class SglangPolicy : public Subject {
 public:
  SglangPolicy(const SubjectOptions& options, const SglangRules& variant, FirstSlots first = {});

  Result<Reply> apply(const Operation& operation) override;
  std::optional<Snapshot> snapshot() const override;

  // For auditors.
  const RadixTree& tree() const { return tree_; }
  RadixTree& audited_tree() { return tree_; }
  const KvPool& kv_pool() const { return kv_; }
  const StatePool& state_pool() const { return states_; }
  const std::vector<RadixRequest>& requests() const {
    return requests_;
  }  ///< those without a name are free places
  const std::vector<HeldSlot>& held_slots() const { return held_slots_; }
  const std::vector<HeldLock>& held_locks() const { return held_locks_; }
  const std::vector<RequestRow>& free_rows() const { return free_rows_; }
  std::size_t free_place_count() const { return free_places_.size(); }
  const HostTier* host() const { return host_.get(); }            ///< null: there is none
  const RadixWindows* windows() const { return windows_.get(); }  ///< null: there are none
  const std::map<std::uint32_t, WaitingRequest>& waiting() const { return waiting_; }
  bool has_states() const { return has_states_; }
  bool strips_thinking() const { return options_.strip_thinking; }
  const Config& config() const { return config_; }
  const SglangOptions& options() const { return options_; }
  /// The rules without a planted defect: those that an auditor holds the policy to.
  const SglangRules& variant() const { return variant_; }
  /// Slots that an admitted request gets for tracking.
  virtual int tracking_slots() const { return 0; }

 protected:
  enum class Forward : std::uint8_t { chunk, decode, verification };

  /// Adds to `takes_` the states that the row over tokens[computed, stop) leaves on its way.
  virtual void track(RadixRequest& /*request*/, std::uint32_t /*stop*/, Forward /*forward*/) {}
  /// Of a verification, what it did up to `stop` tokens is kept.
  virtual void keep_verified(RadixRequest& request, std::uint32_t stop);
  /// A checkpoint of what is computed up to `up_to` tokens.
  virtual Reply store_unfinished(RadixRequest& request, std::uint32_t up_to);
  /// Stores what the first `kept` computed tokens leave in the cache. Returns exist.
  virtual bool store_finished(RadixRequest& request, std::uint32_t kept);
  /// Copies the state after `position` tokens, as the verification has left it, into the target.
  void commit(const RadixRequest& request, std::uint32_t position, StateSlot target);
  /// A verification of that many tokens is about to be launched.
  virtual void prepare_verification(RadixRequest& /*request*/, std::uint32_t /*tokens*/) {}
  /// The results of everything up to request.committed() are there.
  virtual void results_came(RadixRequest& /*request*/) {}

  void slide(RadixRequest& request, std::int64_t last, std::int64_t interval);
  bool make_room_for_states(std::int64_t count, RadixTree::Evicted& evicted);
  /// Takes the KV slots of the first `size` tokens, which another server has computed, and writes
  /// KV and state. The caller has made room for the KV.
  virtual void receive(RadixRequest& request, std::uint32_t size);
  void take_received_kv(RadixRequest& request, std::uint32_t size);
  RadixRequest* find(Name id) {
    if (id.index() >= place_of_.size() || place_of_[id.index()] == kNowhere) return nullptr;
    return &requests_[place_of_[id.index()]];
  }
  RadixTree::Inserted store(RadixRequest& request, std::uint32_t size, StateSlot state);
  void move_lock(RadixRequest& request, NodeIndex node);
  Reply stored_reply(const RadixRequest& request, bool exist) const;
  StateSlot slot_of(const RadixRequest& request) const;
  std::uint32_t whole_pages(std::uint32_t size) const { return size - size % page_; }
  std::int64_t page_ceiling(std::int64_t size) const { return (size + page_ - 1) / page_ * page_; }

  const Config config_;
  const SglangOptions options_;
  LayerState& layers_;
  const SglangRules variant_;
  const SglangRules rules_;
  const bool has_states_;
  const std::uint32_t page_;
  KvPool kv_;
  StatePool states_;
  const std::unique_ptr<HostTier> host_;
  const std::unique_ptr<RadixWindows> windows_;
  RadixTree tree_;
  std::uint32_t batch_tokens_ = 0;  ///< of extends that wait for their `step`
  std::vector<StateTake> takes_;    ///< of the row that is about to be told

 private:
  // Request verbs.
  Result<Reply> admit(const Operation& operation);
  Result<Reply> extend(const Operation& operation);
  Result<Reply> complete(const Operation& operation);
  Result<Reply> accept(const Operation& operation);
  Result<Reply> checkpoint(const Operation& operation);
  Result<Reply> finish(const Operation& operation);
  Result<Reply> release(const Operation& operation);  // abort, preempt
  Result<Reply> step(const Operation& operation);
  void pad_to(std::size_t rows, const std::vector<Name>& ids);
  Reply evict(std::int64_t kv, std::int64_t states, std::int64_t window = 0);
  Result<Reply> evict(const Operation& operation);
  Reply flush();
  Result<Reply> land(const Operation& operation);
  Result<Reply> settle();
  // The storage, sglang_storage.cpp.
  StorageTier* storage() const { return host_ ? host_->storage.get() : nullptr; }
  WaitingRequest& arrive(const Operation& admission);
  WaitingRequest* find_waiting(std::uint64_t number);
  void leave(WaitingRequest& waiting);
  void prefetch(WaitingRequest& waiting, const Operation& admission);
  bool prefetch_is_over(WaitingRequest& waiting, bool late);
  bool has_lost_match(WaitingRequest& waiting, const RadixTree::Match& match,
                      const Operation& admission);
  void pass_over(WaitingRequest& waiting, RadixRequest& request, NodeIndex matched);
  void take_up(WaitingRequest& waiting, RadixRequest& request, const RadixTree::Match& match);
  void release_on_host(const KvRuns& kv, std::uint32_t begin, std::uint32_t end);
  void retire(WaitingRequest& waiting, bool frees_arrived);
  void end_prefetch(WaitingRequest& waiting);
  void hear_of_look_up(const PrefetchRef& prefetch);
  void hear_of(const PrefetchNews& news);
  std::int64_t settle_storage();
  Result<Reply> end_storage_copy(const Operation& operation);
  void drain();
  Result<Reply> make_room(const Operation& operation);
  Reply check() const;
  // Tree verbs.
  Result<Reply> match(const Operation& operation);
  Result<Reply> insert(const Operation& operation);
  Result<Reply> lock(const Operation& operation);
  Result<Reply> unlock(const Operation& operation);
  Result<Reply> hold_slot(const Operation& operation);  // alloc, fork
  Result<Reply> advance_slot(const Operation& operation);
  Result<Reply> copy(const Operation& operation);
  Result<Reply> free(const Operation& operation);

  static tl::unexpected<Error> unknown(const Operation& operation, std::string_view what,
                                       Name name);
  static constexpr std::uint32_t kNowhere = std::numeric_limits<std::uint32_t>::max();
  tl::unexpected<Error> not_idle(const Operation& operation);
  /// The operation's request, if it waits for no accept; else null.
  RadixRequest* idle(const Operation& operation) {
    RadixRequest* const request = find(operation.id);
    return request == nullptr || request->verifying ? nullptr : request;
  }
  HeldSlot* find_slot(Name name);
  bool make_room_for_kv(std::int64_t size, RadixTree::Evicted& evicted);
  std::int64_t kv_demand(const RadixRequest& request, std::int64_t n, Forward forward) const;
  // Sliding windows, sglang_windows.cpp.
  Result<void> check_windows(const Operation& operation) const;
  void slide_for_decoding(RadixRequest& request);
  void release_early(RadixRequest& request);
  void decode_with_windows(RadixRequest& request, std::uint32_t stop, bool async,
                           RadixTree::Evicted& evicted);
  bool has_room(std::int64_t size) const {
    return size <= kv_.free_count() && (!windows_ || size <= windows_->pool.free_count());
  }
  void forward_window(const RadixRequest& request, std::uint32_t stop);
  void read_window(const RadixRequest& request);
  void write_window(const RadixRequest& request, std::uint32_t stop);
  bool is_cut_at_branch(const RadixRequest& request, std::uint32_t size) const;
  void free_window(RadixRequest& request);
  bool allocate_kv(RadixRequest& request, std::int64_t needed);
  void split_at_prompt(const RadixRequest& request, std::uint32_t size, NodeIndex end);
  RadixRequest& request_of(const Operation& admission);
  std::uint32_t match_limit(std::uint32_t size) const;
  bool clears_cursor(bool received, std::uint32_t cached, std::uint32_t on_device) const;
  bool copy_on_write(RadixRequest& request, NodeIndex source, NodeIndex end);
  void copy_again(RadixRequest& request, NodeIndex end);
  void copy_matched_state(RadixRequest& request, StateSlot matched);
  Refusal load(RadixRequest& request, RadixTree::Match& match, NodeIndex& locked);
  void follow_loads(RadixRequest& request) const;
  void await_loads(RadixRequest& request) {
    if (request.awaits != 0) land_awaited(request);
  }
  void land_awaited(RadixRequest& request);
  void begin_at(RadixRequest& request, const RadixTree::Match& match);
  LayerState::Lengths lengths_of(const RadixRequest& request) const;
  Reply admitted(const RadixRequest& request) const;
  bool take_slots(RadixRequest& request, RadixTree::Evicted& evicted);
  void enter(RadixRequest& request, Name id);
  static Result<void> check_tree(const Operation& operation);
  void run(RadixRequest& request, std::uint32_t stop, Forward forward);
  void verify(RadixRequest& request, const Operation& operation);
  std::uint32_t& cursor_of(const RadixRequest& request);
  std::uint32_t pending(const RadixRequest& request);
  void clear_cursor(StateSlot slot);
  void run_with_ring(RadixRequest& request, std::uint32_t stop);
  void fold_ring(RadixRequest& request);
  void count_accepted(RadixRequest& request, std::uint32_t kept);
  std::uint32_t give_back_pending(RadixRequest& request, std::uint32_t kept);
  void move_kept_kv(const RadixRequest& request);
  void free_kv_from(RadixRequest& request, std::uint32_t first);
  void remove(RadixRequest& request);

  std::vector<RadixRequest> requests_;
  std::vector<std::uint32_t> free_places_;  // indices into requests_
  std::vector<std::uint32_t> place_of_;     // by Name::index(), kNowhere where not admitted
  std::vector<RequestRow> free_rows_;
  std::vector<HeldSlot> held_slots_;
  std::vector<HeldLock> held_locks_;
  std::vector<std::uint32_t> cursors_;  // by state slot, where the ring is on
  std::vector<StateSlot> graph_slots_;  // by row of the captured graph: the slot in its buffer
  std::vector<StateSlot> padding_;      // slots of the rows of padding; kept between calls
  KvRuns scratch_;
  struct Deferred {
    StateSlot source, target;
  };
  std::vector<Deferred> deferred_;                   // conv copies that wait for the next forward
  std::map<std::uint32_t, WaitingRequest> waiting_;  // by the index of its name
  std::uint64_t asked_ = 0;                          // requests that a storage was asked for
};

/// Whether the fields of windows fit each other and the others.
Result<void> check_window_fields(const Config& config);
/// Slots of the windows, beside those of full attention.
std::int64_t window_slots(const Config& config);

}  // namespace lockstep::cache_sim
