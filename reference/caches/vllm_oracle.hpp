// The oracle of `vllm-align` and its variants: vLLM 0.33's block cache for hybrid models, rule by
// rule (vllm.md, whose numbers comments cite), over plain lists. It shares no code with the policy
// and is slow on purpose: a look-up searches, the free queue is a vector, a key is a prefix.
//
//   here       vLLM                         what it is
//   Column     (table) req_to_blocks        a request's blocks in one group
//   cached     num_cached_block             columns whose keys are settled
//   running    _allocated_block_reqs        the state and its scratch have blocks
//   partial    _partial_hit_reqs            a shared block that has to be copied
//   stamped    cached_blocks_this_step      keys published in this step
//
// B is a group's block, H the hash block, S the least common multiple of all B, A what hits are
// aligned to (H where they may end inside a block, else S), g the drafts, P the prompt's tokens.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "reference/caches/vllm_offload.hpp"
#include "reference/caches/vllm_pool.hpp"
#include "reference/caches/vllm_simple.hpp"
#include "reference/protocol/subject.hpp"

namespace lockstep::reference {

class VllmOracle final : public Subject, private VllmPool {
 public:
  /// align, with retention 0 whatever the config says, and the older mode that keeps the state of
  /// every block's end.
  enum class Mode { align, sparse, all };

  VllmOracle(const Config& config, Mode mode);

  Result<Reply> apply(const Operation& operation) override;

 private:
  struct Group {
    std::string kind;  ///< attention, window, mamba; state: Mamba in "all" mode
    Count block = 0;
    Count window = 0;
    bool operator==(const Group&) const = default;
  };
  struct Table {
    std::vector<Number> columns;
    Count cached = 0;
    Count retired = 0;
    std::set<Count> unwritten;  ///< columns with blocks that no forward has ended in
    bool running = false;
    Count partial = -1;
    Number partial_block = 0;
    Count own_tail = 0;  ///< tokens of a state that it keyed inside its running block
    Count inner = 0;     ///< tokens of the state that the forward stores inside its chunk; 0: none
    Count inner_column = 0;
  };
  struct Request {
    Tokens known;         ///< as the trace tells them
    Count tokens = 0;     ///< num_tokens: of these, those whose results are there
    Count in_flight = 0;  ///< num_in_flight_tokens
    Count placeholders = 0;
    struct Row {
      Count tokens, spec_tokens;
      bool samples;
    };
    std::vector<Row> under_way;  ///< of each step whose result is out, the oldest first
    Name salt, lora;
    std::vector<ImageSpan> images;
    Count prompt = 0;
    Count computed = 0;
    Count junction = 0;
    std::vector<Number> hashes;
    std::vector<Table> tables;
    bool waits = true;
    bool scheduled = false;
    Count seen = 0;
    Count hit = 0;
    Count external = 0;                ///< tokens after the hit that come from another server
    bool loading = false;              ///< WAITING_FOR_REMOTE_KVS
    bool loaded = false;               ///< it has left that, and not been allocated to since
    bool is_inflight_prefill = false;  ///< in _inflight_prefills
    bool is_prefill_chunk = false;     ///< its last row has left prompt over
    std::vector<std::vector<Number>> offered;  ///< columns by group
    Tokens drafts;
    VllmOffload::Id tier_id = 0;  ///< 0: there is no CPU tier
    bool from_blocks = false;     ///< a CPU tier's tokens are in the host's blocks, not in chunks
    Count before = 0;        ///< tokens that earlier steps had computed when its last row began
    bool first_row = false;  ///< that one is its first
    // With ReplaySSM.
    Count told = 0;        ///< tokens known when it came, or when its turn began
    Count checkpoint = 0;  ///< tokens that its block's state has seen
    Count buffered = 0;    ///< tokens behind these, since its last row
  };
  struct Copy {
    int group;
    Number source, target;
  };

  static bool is_state(const Group& group) {
    return group.kind == "mamba" || group.kind == "state";
  }

  // The verbs.
  Result<Reply> admit(const Operation& operation);
  Result<Reply> extend(const Operation& operation);
  Result<Reply> complete(const Operation& operation);
  Result<Reply> accept(const Operation& operation);
  bool is_result_due(const Request& request) const;
  Result<void> check_row(const Request& request, const Operation& operation, Count start) const;
  Count row_of(const Request& request, const Operation& operation, Count start) const;
  Result<Reply> end(const Operation& operation);
  Result<Reply> checkpoint(const Operation& operation);
  Reply evict(Count wanted);
  Result<Reply> evict_on(const Operation& operation);
  Reply flush();
  Reply check() const;
  void forward();
  void replay(Request& request) const;
  void new_step_starts();
  Result<Reply> load(Request& request);
  bool any_scheduled() const;

  // The rules.
  /// A block with the key in the pool that is looked up: the device's, or the host's.
  Number holder(Key key) const { return sought_->holder(key); }
  void hash(Request& request);
  Number hash_at(const Request& request, Count tokens) const;
  void look_up(Request& request);
  Count find(std::size_t first, Count most, bool drops, Request& request);
  Count find_attention(const std::vector<int>& same, Count most, bool drops, Request& request);
  Count find_window(const std::vector<int>& same, Count most, bool drops, Request& request);
  Count find_state(const std::vector<int>& same, Count most, Request& request);
  bool all_have(const std::vector<int>& same, const Request& request, Count tokens) const;
  Count cut(const Request& request, Count start, Count wanted) const;
  Count leave_rest(const Request& request, Count start, Count chunk) const;
  Count last_boundary(Count tokens, Count unit) const;
  Count behind(const Group& group, Count tokens) const;
  std::optional<Refusal> allocate(Request& request, Count n, bool publishes = true);
  struct Span {
    Count local, total, end;  ///< tokens computed here, with those sent, with those of the chunk
  };
  Count need(int group, const Request& request, Span span, bool is_whole) const;
  Count places(const Group& group, Count end, bool is_whole) const;
  Count inner_state(const Table& table, Count block, const Request& request, Span span) const;
  bool can_store_inside(Count start, Count end, Count place, Count block) const;
  bool waits_for_step(const Request& request) const;
  Count inflight_prefill_reserved_blocks() const;
  void release_behind(Request& request, Count tokens);
  void use_offer(Request& request);
  void receive(Request& request);
  void grow(int group, Request& request, Span span);
  void copy(int group, Table& table, Number target);
  void publish(Request& request, Count computed);
  bool is_worth(const Request& request, const Group& group, Count column) const;
  void publish_tail(int group, Request& request, Count tokens);
  void publish_inner(int group, const Request& request);

  // The CPU tier.
  VllmOffload::Shown shown(const Request& request) const;
  bool has_tier() const { return tier_ || simple_; }
  bool has_disk() const { return tier_ && tier_->has_disk(); }
  bool look_up_tier(const Operation& operation, Request& request);
  bool ask_tiers(Request& request);
  Count look_up_host(const Request& request, Count local);
  void take_tier_blocks(const Request& request, Count external);
  bool is_received(VllmOffload::Id id) { return received_.erase(id) > 0; }
  bool land_one(bool is_load);
  Count reset_tier();
  void end_schedule();
  bool leave_tier(Request& request, Verb verb);
  Result<Reply> land(const Operation& operation);
  Result<Reply> end_transfer(const Operation& operation);
  Result<Reply> settle();

  std::vector<Group> groups_;
  std::vector<std::vector<int>> alike_;  ///< groups of one spec, attention first
  Count hash_block_, scheduler_block_, alignment_, state_block_ = 0;
  bool inside_ = false;   ///< hits may end inside a block
  bool is_lazy_ = false;  ///< the host stores what is evicted next
  std::optional<Count> retention_;
  Count drafts_, lookahead_, modules_, most_tokens_, inner_unit_;
  bool drops_, keeps_junctions_inside_;
  bool overlaps_, reserves_;
  Count watermark_, lookahead_slots_;
  Count buffer_len_;                ///< replayssm_buffer_len; 0: without
  std::optional<Count> in_flight_;  ///< most tokens that are scheduled and not settled
  std::set<Key> stamped_;
  std::vector<Copy> copies_;
  std::map<std::string, Request> requests_;
  std::map<std::string, Number> hash_numbers_;
  const VllmPool* sought_ = this;
  std::unique_ptr<VllmOffload> tier_;
  std::unique_ptr<VllmSimple> simple_;
  VllmOffload::Id last_id_ = 0;
  /// Requests that were turned away, by name: their lines, and who they are for a tier with a disk.
  std::map<std::string, std::pair<std::string, VllmOffload::Id>> turned_away_;
  std::vector<VllmOffload::Offer> offers_;      ///< of states that were keyed in this step
  std::vector<VllmOffload::Id> in_order_;       ///< requests that this step computes
  std::set<VllmOffload::Id> received_;          ///< loads that have come and were not taken up
  std::map<VllmOffload::Id, Request> leaving_;  ///< aborted, and their loads are to come
  bool step_has_started_ = false;               ///< though nothing may be scheduled in it
  Count changes_ = 0;
};

}  // namespace lockstep::reference
