// vLLM 0.33's block cache as a subject: policies `vllm-align`, `vllm-align-retention-0` and
// `vllm-all`.
//
// The request verbs call the block manager (block_manager.hpp) as follows:
//
//   admit     the look-up of a waiting request. It holds nothing, so the next operation that
//             changes the cache has to be this request's `extend`
//   extend    one allocation. A prefill chunk may be cut shorter, which `n=` says: to 0 where no
//             state could be kept at its end. Refused as no_kv; or as same_step where it cannot be
//             in this step: a state is offered that only this step's forward will write, or the
//             cache has changed since the look-up
//             With overlap=1 its tokens are those of a result that is out: what vLLM does not know
//             is neither hashed nor published. With drafts as well it tells none: it begins after
//             all places of the row before, and `accept` says how many of these were filled.
//             A look-up that lacks one token may be extended by drafts too, which fill the row's
//             places; where the chunk would be cut, they are left out (n=1)
//   complete  the result of the request's oldest step: what it fills is published
//   step      ends the schedule: copies are done, the forward runs, the next step begins. A request
//             whose forward has been decided cannot be touched again before it, so `finish`,
//             `accept`, `abort`, `preempt` or a second `extend` bring it about
//   accept    the tokens of a verification: what they fill is published. With drafts configured
//             also the token of a row that had none; with overlap, of the oldest row
//   finish, abort, preempt   give the blocks back; what was published stays until it is popped
//             With a CPU tier the load of what it has: refused as same_step until it has landed
//             and is settled
//   land, settle   a copy between the tiers is done; the scheduler hears of those that are
//   fail      a copy from or to the disk ends without having brought anything
//   evict     takes the keys of the first blocks of the free queue that have some
//   flush     takes all keys, where no request holds a block. With a CPU tier it waits for all
//             copies first, and resets the tier, which `evict tier=host` does alone
//
// There is no `checkpoint` to ask for: every prefill chunk ends where a state can be kept. Rules
// are cited by their numbers in reference/caches/vllm.md.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cache_sim/policies/vllm/align_worker.hpp"
#include "cache_sim/policies/vllm/block_manager.hpp"
#include "cache_sim/policies/vllm/offload_tier.hpp"
#include "cache_sim/policies/vllm/simple_tier.hpp"
#include "reference/protocol/subject.hpp"

namespace lockstep::cache_sim {

struct VllmRequest {
  /// A step under way, of a request whose extends are asynchronous.
  struct Flight {
    std::int64_t tokens;
    std::int64_t drafts;  ///< the last ones of these
    bool samples;
  };
  Name id;
  ContentKeys content;
  ContentKeys hashed;  ///< the part of it that goes into the hashes of blocks
  Tokens known;        ///< also those whose results have not come, which the manager does not know
  BlockRequest blocks;
  BlockHit hit;                 ///< of its look-up, while it waits
  bool waits = false;           ///< looked up, and nothing allocated
  std::uint64_t seen = 0;       ///< the number of changes of the cache before that look-up
  bool scheduled = false;       ///< in the step that is being decided
  bool begins = false;          ///< with its first row
  bool prefills = false;        ///< its last row did not reach the end of what was known
  std::int64_t start = 0;       ///< the first token that this step, or the last one, computes
  std::int64_t external = 0;    ///< tokens after the hit that come from another server
  bool from_blocks = false;     ///< with a CPU tier: from the host's blocks, not from its chunks
  bool loads = false;           ///< they come in the step that is being decided
  bool is_loading = false;      ///< or later: their `complete` is to come
  bool was_loaded = false;      ///< so, and nothing has been computed since
  bool is_in_flight = false;    ///< loads, or prefills until the end of the step that is decided
  Tokens drafts;                ///< of a verification that waits for its accept
  std::vector<Flight> flights;  ///< the oldest first
  std::int64_t promised = 0;    ///< tokens that these sample, and their drafts
  RingStep ring;                ///< of its last row
  std::int64_t ring_base = -1;  ///< tokens that were known when it came, or when its turn began
  bool rested = false;          ///< a step has run without it since its last row
};

/// A request that was refused by a tier with a disk, and is known to it.
struct AskedRequest {
  BlockRequest blocks;    ///< none but its keys and its number in the tier
  std::string admission;  ///< its line
};

class VllmPolicy final : public Subject {
 public:
  VllmPolicy(const SubjectOptions& options, BlockRules rules);

  Result<Reply> apply(const Operation& operation) override;
  std::optional<Snapshot> snapshot() const override;
  std::string decided() const override;
  Findings take_findings() override;

  const BlockManager& manager() const { return manager_; }
  /// Null where there is none.
  const OffloadTier* tier() const { return tier_.get(); }
  const SimpleTier* simple() const { return simple_.get(); }
  /// By Name::index().
  const std::map<std::uint32_t, AskedRequest>& asked() const { return asked_; }
  /// Blocks of aborted requests whose loads have not landed.
  const std::vector<BlockRequest>& leaving() const { return leaving_; }
  const std::vector<VllmRequest>& requests() const { return requests_; }
  /// Null where no request has this name.
  const VllmRequest* request(Name id) const;
  bool has_scheduled() const { return !scheduled_.empty(); }

  /// Follows what the blocks hold by labels, and by numbers beside them where the run has some; to
  /// be called before the first operation.
  LabelBlocks& keep_labels();
  /// Whether the tokens of each row are known when it runs. They are not with overlap and drafts: a
  /// row then begins after draft places whose results have not come, and no worker follows the
  /// blocks' content.
  bool knows_its_rows() const { return config_.overlap == 0 || config_.drafts == 0; }

 private:
  /// Runs every step on this memory.
  void follow(BlockMemory& memory);
  Result<Reply> admit(const Operation& operation);
  Result<Reply> extend(const Operation& operation);
  Reply load(VllmRequest& request);
  std::int64_t reserved() const;
  void end_load(VllmRequest& request);
  Result<Reply> complete(const Operation& operation);
  Result<Reply> accept(const Operation& operation);
  Result<void> take_result(VllmRequest& request, const Tokens& tokens);
  Result<Reply> release(const Operation& operation);
  bool has_tier() const { return tier_ != nullptr || simple_ != nullptr; }
  bool has_disk() const { return tier_ != nullptr && tier_->disk() != nullptr; }
  bool look_up_tier(const Operation& operation, VllmRequest& request);
  bool ask_tiers(VllmRequest& request);
  void take_tier_blocks(const VllmRequest& request, std::int64_t external);
  bool take_loaded(std::uint64_t request);
  void end_schedule();
  void leave_tier(VllmRequest& request, Verb verb);
  Result<Reply> land(const Operation& operation);
  bool land_one(bool to_host);
  std::int64_t reset_tier();
  Result<Reply> end_disk_copy(const Operation& operation);
  Result<Reply> settle();
  Result<Reply> evict(const Operation& operation);
  void add_tier(const std::function<void(std::int64_t)>& add) const;
  Result<Reply> checkpoint(const Operation& operation);
  Reply evict_keys(std::int64_t blocks);
  Reply flush();
  Reply check() const;
  std::int64_t contents() const;
  void begin_step();
  void forward();
  void step_rings();
  RingStep ring_step(VllmRequest& request) const;
  void run_worker();
  void look_up(VllmRequest& request);
  Result<void> check_extend(const VllmRequest& request, const Operation& operation) const;
  std::int64_t begin_of(const VllmRequest& request) const;
  std::int64_t chunk(const VllmRequest& request, const Operation& operation) const;
  bool is_cut_padding(const VllmRequest& request, const Operation& operation) const;
  ContentKeys hashed(ContentKeys content) const;
  void learn(const VllmRequest& request);
  void deliver(VllmRequest& request, std::int64_t tokens);
  VllmRequest* find(Name id) { return const_cast<VllmRequest*>(request(id)); }
  Result<VllmRequest*> idle(const Operation& operation);

  Config config_;
  std::int64_t most_tokens_;  // of a prefill chunk
  std::int64_t lookahead_;    // tokens that a draft model writes after a row
  bool cuts_padding_;         // the scheduler's long_prefill is less than a row with all drafts
  bool reserves_ = false;     // a load leaves what prefills that are under way still need
  std::int64_t running_ = 0;  // requests that something was computed for
  BlockManager manager_;
  KeyTable keys_;
  std::vector<VllmRequest> requests_;     // those without a name are free places
  std::vector<std::uint32_t> places_;     // free ones
  std::vector<std::uint32_t> place_of_;   // by Name::index(), 1 + place
  std::vector<std::uint32_t> scheduled_;  // places
  bool goes_on_prefilling_ = false;       // a row of this step whose request ran before it
  bool has_begun_ = false;                // this step, with the end of a load
  std::uint64_t changes_ = 0;
  std::unique_ptr<OffloadTier> tier_;
  std::unique_ptr<SimpleTier> simple_;
  std::uint64_t last_offload_ = 0;  // BlockRequest::offload, where there is no OffloadTier
  std::vector<BlockRequest> leaving_;
  std::map<std::uint32_t, AskedRequest> asked_;
  // Null where the blocks' content is not followed.
  NumberedBlocks* numbers_;
  std::unique_ptr<LabelBlocks> labels_;
  std::unique_ptr<LabelledBlocks> both_;
  std::unique_ptr<AlignWorker> worker_;
};

/// Adds to a digest the free queue, references and keys of a pool (VllmPolicy::contents()).
void add_pool(const BlockPool& pool, const std::function<void(std::int64_t)>& add);

}  // namespace lockstep::cache_sim
