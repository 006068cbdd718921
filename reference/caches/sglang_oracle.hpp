// SGLang's radix cache, version 0.5.23: the subject that follows its rules (sglang.md) literally.
// Two policies: `radix` caches KV alone; `sglang-no-buffer` caches, beside the KV, one recurrent
// state per stored prefix, and its pages are single tokens. This oracle gives the decision digests
// of SGLang's Rust and Python tree cores on `sglang-w1`. Numbers in brackets are rules of
// sglang.md.
//
//   here                    SGLang
//   stored prefix           node, named by the prefix at which it ends (sglang_prefix_map.hpp)
//   state, tombstone        the node's MAMBA value, and its absence
//   full_lock, state_lock   lock_ref of FULL and of MAMBA
//   last_access, t          last_access_counter
//   state_use               place in the MAMBA LRU list
//   protected               cache_protected_len: tokens of a request whose KV the cache owns
//   computed                kv_committed_len
//   live slot               the request's own state slot
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "reference/caches/sglang_prefix_map.hpp"
#include "reference/protocol/subject.hpp"

namespace lockstep::reference {

class SglangOracle : public Subject {
 public:
  /// Differences between the policies. The defaults are sglang-no-buffer's.
  struct Variant {
    bool has_states = true;
    SglangPrefixMap::Rules rules{};
    bool evicts_full_request = false;    ///< a shortage of KV evicts what is needed, not what lacks
    bool tracks_eviction_apart = false;  ///< states that fell in FULL do not count for MAMBA
    bool slots_tell_no_kv = false;       ///< evicted_kv of an admission is 0
    bool checkpoint_matches = false;     ///< a checkpoint's key is matched after its insert
    bool finish_copies = false;          ///< a finish inserts a copy of the live state
    bool tells_every_branch = false;     ///< a branch that is no deeper than the prefix as well
  };

  /// Moves no state: a stored state stands for its prefix by definition, so the oracle has no use
  /// for a LayerState.
  SglangOracle(const Config& config, const Variant& variant);

  Result<Reply> apply(const Operation& operation) override;

  /// Tokens of a request that is admitted whose KV is the cache's.
  std::int64_t owned_of(Name id) const { return requests_.at(id.text()).protected_size; }

 protected:
  using Evicted = SglangPrefixMap::Evicted;

  /// The forward with which a request got from `from` to `to` computed tokens.
  enum class Forward : std::uint8_t { chunk, decode, verification };

  /// A tracked state and the slot that holds it [1.8].
  struct Tracked {
    std::size_t slot = 0;
    std::int64_t length = 0;  ///< 0: there is none
  };

  /// Drafts as what they spell: the ways from the last known token to each of them.
  class DraftTree {
   public:
    /// None where a draft stands after none of those before it, or two spell the same.
    static std::optional<DraftTree> of(const Operation& extend);
    bool has(const std::vector<Token>& way) const { return way.empty() || ways_.contains(way); }

   private:
    std::set<std::vector<Token>> ways_;
  };
  /// Draft tokens whose verification has not been accepted yet.
  struct Verification {
    std::int64_t inputs;
    DraftTree drafts;
  };
  struct Request {
    Prefix known;                     ///< prompt and outputs
    std::int64_t prompt = 0;          ///< tokens of the original prompt
    std::int64_t admitted = 0;        ///< tokens known at the admission
    std::int64_t branch = 0;          ///< the match's branch position
    std::int64_t computed = 0;        ///< tokens that the live state stands for, with its ring
    std::int64_t written = 0;         ///< those that it stands for without the ring [1.12]
    std::int64_t allocated = 0;       ///< tokens that have KV, rounded up to pages
    std::int64_t protected_size = 0;  ///< tokens whose KV is the map's: this prefix is locked
    bool state_locked = true;         ///< the lock's receipt
    std::int64_t inserted = 0;        ///< tokens that its checkpoints have inserted
    std::int64_t awaits = 0;          ///< the newest load when it was admitted or stored
    std::int64_t window_evicted = 0;  ///< tokens that its window has left behind [1.15]
    std::int64_t window_locked = 0;   ///< the first token of the prefix's window that it has locked
    bool window_released = false;     ///< it has given up that lock early
    std::int64_t decoded = 0;         ///< decode steps since the last checkpoint
    std::int64_t prefilled = 0;       ///< tokens up to the end of the last chunk
    StateSlot live;
    std::vector<StateSlot> tracking;  ///< the extra buffer's slots
    std::size_t write = 0;            ///< which of them is written next
    Tracked latest, earlier;
    std::optional<Verification> pending;
    std::deque<std::int64_t> in_flight;  ///< tokens before each extend whose result is out
    std::deque<Tracked> under_way;       ///< lazy: written by steps whose result is out

    /// Tokens whose results are there.
    std::int64_t committed() const { return in_flight.empty() ? computed : in_flight.front(); }
  };
  struct Stored {
    bool exist = true;
    std::int64_t length = 0;  ///< tokens that the map owns now
  };

  /// The number of slots that a request gets beside its live one.
  virtual int tracking_slots() const { return 0; }
  virtual void advanced(Request&, std::int64_t /*from*/, Forward) {}
  /// A verification of that many tokens begins.
  virtual void before_verification(Request&, std::int64_t /*tokens*/) {}
  /// Results have come, up to request.committed().
  virtual void results_came(Request&) {}
  /// Stores the request's state of up to `up_to` tokens, if it has one; none where no slot is free.
  virtual std::optional<Stored> store_unfinished(Request& request, std::int64_t up_to);
  /// Stores what `owned` tokens leave behind; the slot of the stored state is no longer the
  /// request's.
  virtual Stored store_finished(Request& request, std::int64_t owned);

  std::int64_t whole_pages(std::int64_t tokens) const {
    return tokens / config_.page * config_.page;
  }
  std::int64_t grid() const;
  std::int64_t branch_of(std::int64_t full, std::int64_t told) const;
  StateSlot take_slot(Evicted& evicted);
  std::int64_t slots_free() const;
  void release_slot(StateSlot slot);
  void lock(Request& request, const Prefix& prefix, bool with_state);
  void unlock(const Request& request, const Prefix& prefix, bool with_state);
  void move_lock(Request& request, std::int64_t to);
  bool store(Request& request, std::int64_t length, StateSlot state);
  void slide(Request& request, std::int64_t last, std::int64_t interval) const;  ///< [1.15]

  const Config config_;
  const Variant variant_;
  const bool has_states_;
  std::deque<StateSlot> free_slots_;  // after those that nobody has used yet
  std::int64_t next_unused_slot_ = 1;
  SglangPrefixMap cached_;

 private:
  struct Held {
    StateSlot slot;
    std::int64_t length = 0;  ///< tokens that the state stands for
  };

  Result<void> check_admission(const Operation& operation) const;
  Result<Reply> admit(const Operation& operation);
  Result<Reply> extend(const Operation& operation);
  Result<Reply> complete(const Operation& operation);
  Result<Reply> accept(const Operation& operation);
  Result<Reply> checkpoint(const Operation& operation);
  Result<Reply> finish(const Operation& operation);
  Result<Reply> abort(const Operation& operation);
  Reply evict(std::int64_t kv, std::int64_t states, std::int64_t window = 0);
  Result<Reply> evict(const Operation& operation);
  Reply flush();
  Result<Reply> land(const Operation& operation);
  Result<Reply> settle();

  // Sliding windows [1.15].
  Result<void> check_windows(const Operation& operation) const;
  void slide_for_decoding(Request& request);
  bool has_room_for_steps(const Request& request, std::int64_t end, Evicted& evicted);
  std::int64_t cut_at_branch(const Request& request, std::int64_t size) const;
  std::int64_t window_free();

  // The storage [1.14].
  /// A request that asks again until it is admitted.
  struct Waiting {
    std::string asked;                 ///< its first line
    std::int64_t fetch = 0;            ///< number of its fetch in flight; 0: none
    std::set<std::int64_t> fetches{};  ///< it and those before it
    std::int64_t matched = 0;          ///< told tokens of the match before its last fetch
    std::int64_t repeats = 0;
    bool waits = false, is_late = false;
  };
  Waiting& waiting_for(const Operation& operation);
  SglangFetch* fetch_of(const Waiting& waiting);
  void look_up(Waiting& waiting, const Operation& operation);
  bool fetch_is_over(Waiting& waiting, bool late);
  void give_up(Waiting& waiting);
  void finish_fetch(Waiting& waiting);
  bool has_lost_match(Waiting& waiting, std::int64_t told, const Operation& operation);
  void make_room_for(std::int64_t number);
  void hear(const SglangStorage::News& news);
  std::int64_t settle_all();
  bool end_write(const SglangStorage::Failing& failing);
  Result<Reply> end_storage_copy(const Operation& operation);
  void drain();

  void take_copy_slot(Request& request, const Prefix& source);
  bool make_room_for_load(const Prefix& end);
  std::optional<Refusal> load(Request& request, Prefix& best, std::int64_t more, bool& loaded);
  Result<Reply> make_room(const Operation& operation);
  Reply check();

  Result<Reply> match(const Operation& operation);
  Result<Reply> alloc(const Operation& operation);
  Result<Reply> advance(const Operation& operation);
  Result<Reply> fork(const Operation& operation);
  Result<Reply> copy(const Operation& operation);
  Result<Reply> free(const Operation& operation);
  Result<Reply> insert(const Operation& operation);
  Result<Reply> lock(const Operation& operation);
  Result<Reply> unlock(const Operation& operation);

  std::int64_t up_to_whole_pages(std::int64_t tokens) const {
    return whole_pages(tokens + config_.page - 1);
  }
  std::int64_t kv_free() const;
  bool has_room(std::int64_t needed);
  bool make_kv_free(std::int64_t needed, Evicted& evicted);
  bool allocate(Request& request, std::int64_t to, Forward forward, Evicted& evicted);
  bool make_slots_free(std::int64_t needed, Evicted& evicted);
  bool take_slots(Request& request, Evicted& evicted);
  Result<Reply> hold_slot(Name name, std::int64_t length);
  void forget(std::map<std::string, Request>::iterator request);
  void write_state(Request& request, std::int64_t from, Forward forward) const;

  std::map<std::string, Request> requests_;
  std::map<std::string, Held> held_;  ///< state slots that tree verbs named
  struct Lock {
    Prefix end;
    std::int64_t window_begin;
  };
  std::map<std::string, Lock> locks_;  ///< that tree verbs named
  std::map<std::string, Waiting> waiting_;
  SglangStorage storage_{config_.number("storage_ranks")};
  std::int64_t fetches_ = 0;  ///< so far
};

}  // namespace lockstep::reference
