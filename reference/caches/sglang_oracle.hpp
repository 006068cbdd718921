// SGLang's radix cache, version 0.5.23: the rules, and the subject that follows them literally.
// Two policies: `radix` caches KV alone; `sglang-no-buffer` caches, beside the KV, one recurrent
// state per stored prefix, and its pages are single tokens. Read off SGLang's UnifiedRadixCache and
// its Rust and Python tree cores; this oracle gives their decision digests on `sglang-w1`.
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
//
// 1.1 State. A clock T, +1 per read. With a prefix go its lock counts, its time t and perhaps a
//   state; to store a prefix reads T. A leaf is a stored prefix without stored extensions and
//   without locks; it need not have a state. State slots are 1, 2, …: an allocation takes the front
//   of the free list, a freed slot goes to its end.
//
// 1.2 match(key). An admission asks for tokens[:len-1], because a forward computes at least one.
//   1. The key is cut to whole pages. If nothing is left, nothing happens.
//   2. full = tokens of the key that are stored. If they end inside an edge, it is split (1.3).
//      prefix = the longest stored prefix of the key that has a state; in `radix`, the longest.
//   3. That state becomes the most recently used one; the others keep their places. The prefix's
//      t = T * 2^20, and going down its own stored prefixes each is one less. Longer ones stay old.
//   4. branch = full cut to the grid lcm(max(model chunk or 64, page), page), if that is more than
//      prefix: where one more state would have helped.
//   5. Copy-on-write: a request that hits takes a slot for its own copy of the state (its live
//      slot) and evicts one state if no slot is free; prefix is locked meanwhile.
//
// 1.3 split. The new, shorter prefix gets the longer one's full lock, no state lock and no state,
//   and reads T; then the longer one's t = T, so that it is the newer of the two.
//
// 1.4 insert(key, state, prev). The key is cut to whole pages; if nothing is left, it exists.
//   The root reads T. Each stored prefix of the key, shortest first, gets t = T; an edge in which
//   the key ends, or which it leaves, is split. The caller's KV of [prev, stored tokens) is a
//   duplicate and is freed. Then,
//     tokens left over     the key is stored with the state               exist = 0
//     key without a state  it gets the state, t = T                       exist = 0
//     key with a state     t = T; the caller keeps the state it brought   exist = 1
//   and the key's state is the most recently used one; no other state moves. Without states, exist
//   says that the whole key was stored.
//
// 1.5 lock(prefix). +1 full lock on it and on each stored prefix of it; +1 state lock on it alone,
//   even if it is a tombstone. unlock takes back exactly what its lock took.
//
// 1.6 evict(kv, states). FULL, then MAMBA; states that fall in FULL count for MAMBA.
//   FULL: the leaf with the smallest t goes, with its state, until enough KV was freed. A leaf's
//      own prefixes stay, even a tombstone without extensions.
//   MAMBA: the least recently used state without a state lock goes, until enough states were freed;
//      on a leaf the KV goes too, elsewhere a tombstone stays.
//   An allocation that lacks something evicts what it lacks. Where pages have more than one token
//   it asks for more than it takes (allocation.py:186, 583): a chunk or a verification for its
//   tokens and one page, a decoded token for one page, whether or not it begins one. What it does
//   not take stays free. path_cap: after a state was stored, the shallowest states of its path go
//   until the cap holds,
//      but not the one just stored, a locked one, or a fork's (where not one edge goes on).
//
// 1.7 Requests.
//   admit: match, copy-on-write, lock prefix. Refused if the tokens behind it, and `room`, are more
//      than the KV that is free or unlocked. Without a hit, take a live slot (evicting one state).
//   extend: a chunk takes KV slots, evicting what it lacks.
//   checkpoint: take a slot (evicting one state) for a copy of the live state; insert that with
//      known[:computed] and prev = protected; unlock the old prefix, lock the new one (under
//      skip_decode_lock without its state); protected = its size; free the copy if the key existed.
//      Where there is no slot SGLang asserts; here the checkpoint is refused.
//   finish: insert known[:computed] with the live slot. The state moves without a copy; if the key
//      existed, the slot is freed. strip_thinking leaves the prompt alone: `radix` inserts that if
//      it is not less than protected. A live state of more tokens cannot go with it, so a hybrid
//      request inserts nothing. (0.5.23 attaches the state to the prompt, and where protected is
//      past the prompt frees KV of the tree or asserts.) In `radix`, a key that adds nothing to
//      protected is inserted as well, and with overlap the key goes to the end of the step that is
//      under way: kv_committed_len counts a token at its launch. With up_to=N the answer ends
//      inside an accepted run: at most N - 1 tokens count, since an answer's last token never does.
//   admit external=N: KV and state of the first N tokens come from another server, of all but the
//      last where there are no more. What the match found stays as it is; KV for the rest is taken
//      at once, behind the slots.
//   extend parents=: drafts that are a tree; what is accepted is one of its ways from the root.
//   `radix`: an insert of more than the prompt (unified_radix_cache.py:1257) is followed by one of
//      the prompt's whole pages, which frees nothing: the prompt becomes a stored prefix of its
//      own, newer than its outputs, and these can be evicted without it.
//   Then, and on abort and preempt: KV beyond protected is freed, the prefix is unlocked.
//
// 1.8 sglang-extra-buffer: reference/caches/sglang_extra_buffer_oracle.cpp. 1.10, 1.11 older
// versions: reference/caches/sglang_legacy_oracle.cpp.
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
  /// Where the policies differ. The defaults are sglang-no-buffer's.
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

 protected:
  using Evicted = SglangPrefixMap::Evicted;

  /// How a request got from `from` to `to` computed tokens.
  enum class Forward : std::uint8_t { chunk, decode, verification };

  /// A tracked state and the slot that holds it [1.8].
  struct Tracked {
    std::size_t slot = 0;
    std::int64_t length = 0;  ///< 0: there is none
  };

  /// Drafts as what they spell: the ways from the last known token to each of them.
  class DraftTree {
   public:
    /// None where a draft stands behind none of those before it, or two spell the same.
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
    std::int64_t prompt = 0;          ///< how many of them are the original prompt
    std::int64_t admitted = 0;        ///< how many were known at the admission
    std::int64_t branch = 0;          ///< the match's branch position
    std::int64_t computed = 0;        ///< tokens that the live state stands for
    std::int64_t allocated = 0;       ///< tokens that have KV, rounded up to pages
    std::int64_t protected_size = 0;  ///< tokens whose KV is the map's: this prefix is locked
    bool state_locked = true;         ///< the lock's receipt
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

  /// How many slots a request gets beside its live one.
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
  StateSlot take_slot(Evicted& evicted);
  std::int64_t slots_free() const;
  void release_slot(StateSlot slot);
  void move_lock(Request& request, std::int64_t to);
  bool store(const Request& request, std::int64_t length, StateSlot state);

  const Config config_;
  const Variant variant_;
  const bool has_states_;
  std::deque<StateSlot> free_slots_;  // behind those that nobody has used yet
  std::int64_t next_unused_slot_ = 1;
  SglangPrefixMap cached_;

 private:
  struct Held {
    StateSlot slot;
    std::int64_t length = 0;  ///< tokens that the state stands for
  };

  Result<Reply> admit(const Operation& operation);
  Result<Reply> extend(const Operation& operation);
  Result<Reply> complete(const Operation& operation);
  Result<Reply> accept(const Operation& operation);
  Result<Reply> checkpoint(const Operation& operation);
  Result<Reply> finish(const Operation& operation);
  Result<Reply> abort(const Operation& operation);
  Reply evict(std::int64_t kv, std::int64_t states);
  Result<Reply> make_room(const Operation& operation);
  Reply check() const;

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
  bool make_kv_free(std::int64_t needed, Evicted& evicted);
  bool allocate(Request& request, std::int64_t to, Forward forward, Evicted& evicted);
  bool make_slots_free(std::int64_t needed, Evicted& evicted);
  Result<Reply> hold_slot(Name name, std::int64_t length);
  void forget(std::map<std::string, Request>::iterator request);

  std::map<std::string, Request> requests_;
  std::map<std::string, Held> held_;     ///< state slots that tree verbs named
  std::map<std::string, Prefix> locks_;  ///< locks that tree verbs named
};

}  // namespace lockstep::reference
