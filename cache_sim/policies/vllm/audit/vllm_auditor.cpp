// Checks invariants of the pool and the tables of vLLM's block cache, and reports what the worker
// found wrong in the blocks (label_blocks.hpp). It keeps tables, reference counts and the
// free queue a second time and shares none of the policy's decisions:
//
//   A1  a block's references are its columns in tables, and 1 for each end of a copy that is
//       queued, or of one to or from the host's blocks that is not settled (simple_check.hpp)
//   A2  a block is in the free queue exactly where nobody refers to it; the count says how many are
//   A3  blocks are popped from the head of the queue; a block that a hit takes leaves from anywhere
//   A4  a block that is given back goes to the tail where it has a key, else to the head
//   A5  the index of keys and the keys of the blocks are the same, and no key is there twice
//   A6  the null block has no key and no reference
//   A7  a block stands once in a table of a group, and in two tables only where it has a key
//   A8  with replay rings the running state of a request has seen all tokens that are computed but
//       the last ones, fewer than a ring has entries, and none of these ends a block
//
// Of the CPU tier, with the laws of copies in flight that reference/caches/vllm.md lists:
//
//   L1  a chunk that may be loaded holds what its key says
//   L6  a chunk's place is that of one key, and those of no key are free
//   L7  a chunk is written, or read so many times, as copies that are not settled say
//   L8  a request that waits for a load has one
//   L13 a request that is refused twice while no copy is in flight and nobody else's moves has more
//       of its chunks on the CPU tier the second time. So it is not refused for ever
//
// After each operation it looks at the blocks whose references changed; recompute() at everything.
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cache_sim/policies/vllm/audit/simple_check.hpp"
#include "cache_sim/policies/vllm/label_blocks.hpp"
#include "cache_sim/policies/vllm/vllm_policy.hpp"
#include "reference/base/counted.hpp"

namespace lockstep::cache_sim {
namespace {

constexpr std::size_t kMostFindings = 8;  // of one operation: the first is the one that counts

class VllmAuditor final : public Auditor {
 public:
  explicit VllmAuditor(VllmPolicy& policy)
      : policy_(policy),
        pool_(policy.manager().pool()),
        labels_(policy.keep_labels()),
        records_(std::size_t{pool_.block_count()} + 1) {
    read_queue();
  }

  void after(const Operation& operation, const Reply& reply, Findings& findings) override {
    findings_ = &findings;
    take_worker_findings();
    if (findings.empty() && policy_.tier() != nullptr) check_tier(*policy_.tier());
    if (findings.empty() && policy_.simple() != nullptr) check_simple(*policy_.simple());
    if (policy_.tier() != nullptr && policy_.tier()->disk() != nullptr)
      check_disk(operation, reply, *policy_.tier());
    if (!findings.empty()) return;
    collect_changes(operation);
    check_changed();
    if (!findings.empty()) return;
    const bool takes_keys = operation.verb == Verb::evict || operation.verb == Verb::flush;
    if (takes_keys)
      read_queue();  // the removed keys decided where their blocks were put
    else
      check_queue();
  }

  void recompute(Findings& findings) override {
    findings_ = &findings;
    if (!findings.empty()) return;
    recount_references();
    recount_queue();
    recount_keys();
    check_rings();
    if (!findings.empty() || policy_.has_scheduled() || !policy_.knows_its_rows()) return;
    labels_.check_all();
    take_worker_findings();
  }

 private:
  /// A block as it was after the last operation.
  struct Record {
    std::int32_t references = 0;
    BlockId next = kNullBlock, previous = kNullBlock;  // in the free queue; of block 0: its ends
    bool was_keyed = false;
    KeyId key = 0;  // its primary one
    bool is_changed = false;
    std::int32_t before = 0;
  };
  using Table = std::vector<std::vector<BlockId>>;  // by group
  /// The last refusal for copies of the disk while none was in flight.
  struct Refused {
    std::string admission;
    std::int64_t chunks = 0;  ///< of the request, on the CPU tier
    OffloadTier::JobId last_job = 0;
  };

  void report(FindingKind kind, std::string text, std::string expected, std::string actual) {
    if (findings_->size() < kMostFindings)
      findings_->push_back({kind, std::move(text), std::move(expected), std::move(actual)});
  }

  void take_worker_findings() {
    for (Finding& finding : policy_.take_findings()) findings_->push_back(std::move(finding));
  }

  /// A8.
  void check_rings() {
    const BlockRules& rules = policy_.manager().rules();
    if (rules.ring == 0 || policy_.has_scheduled()) return;
    for (const VllmRequest& request : policy_.requests()) {
      const std::int64_t computed = request.blocks.computed;
      if (!request.id.exists() || !request.blocks.runs || computed == 0) continue;
      const std::int64_t least =
          std::max(computed - rules.ring + 1, floor_to(computed, rules.state_block));
      for (std::uint32_t group = 0; group < rules.groups.size(); ++group) {
        if (!is_state(rules.groups[group].kind)) continue;
        const BlockId block =
            block_at(request.blocks.tables[group].columns, (computed - 1) / rules.state_block);
        const std::int64_t seen = labels_.size_of_state(block, group);
        if (seen < least || seen > computed)
          report(FindingKind::wrong_state_prefix,
                 fmt::format("of request `{}` {} are computed, and the state in block {} has seen "
                             "{}",
                             request.id.text(), counted(computed, "token"), block, seen),
                 fmt::format("{} to {}", least, computed), std::to_string(seen));
      }
    }
  }

  // --- The free queue, kept a second time --------------------------------------------------------

  void read_queue() {
    queue_size_ = 0;
    records_[kNullBlock].next = records_[kNullBlock].previous = kNullBlock;
    for (BlockId block = pool_.last_free();
         block != kNullBlock && queue_size_ <= pool_.block_count();
         block = pool_.previous_free(block))
      insert_behind(kNullBlock, block);
  }
  void insert_behind(BlockId place, BlockId block) {
    const BlockId next = records_[place].next;
    records_[block].next = next;
    records_[block].previous = place;
    records_[place].next = block;
    records_[next].previous = block;
    records_[block].was_keyed = pool_.has_key(block);
    if (pool_.has_key(block)) records_[block].key = pool_.primary(block).key;
    ++queue_size_;
  }
  void unlink(BlockId block) {
    Record& record = records_[block];
    records_[record.previous].next = record.next;
    records_[record.next].previous = record.previous;
    record.next = record.previous = kNullBlock;
    --queue_size_;
  }

  // --- After an operation ------------------------------------------------------------------------

  void count(BlockId block, std::int32_t by) {
    if (block == kNullBlock || block >= records_.size()) return;
    Record& record = records_[block];
    if (!record.is_changed) {
      record.is_changed = true;
      record.before = record.references;
      changed_.push_back(block);
    }
    record.references += by;
  }

  /// Counts the references of the request's tables and of the queued copies.
  void collect_changes(const Operation& operation) {
    changed_.clear();
    for (const BlockCopy& copy : copies_) {
      count(copy.source, -1);
      count(copy.target, -1);
    }
    copies_ = policy_.manager().copies();
    for (const BlockCopy& copy : copies_) {
      count(copy.source, 1);
      count(copy.target, 1);
    }
    for (const BlockId block : leaving_) count(block, -1);
    leaving_ = leaving();
    for (const BlockId block : leaving_) count(block, 1);
    for (const BlockId block : held_) count(block, -1);
    held_ = held();
    for (const BlockId block : held_) count(block, 1);
    if (!operation.id.exists()) return;
    if (operation.id.index() >= tables_.size()) tables_.resize(operation.id.index() + 1);
    Table& known = tables_[operation.id.index()];
    const VllmRequest* const request = policy_.request(operation.id);
    const std::size_t groups = policy_.manager().rules().groups.size();
    known.resize(groups);
    for (std::size_t group = 0; group < groups; ++group) {
      static const std::vector<BlockId> kNone;
      const bool runs = request != nullptr && request->blocks.runs;
      follow_table(known[group], runs ? request->blocks.tables[group].columns : kNone);
    }
  }

  /// Blocks that stand in tables of requests which have left before their loads landed.
  std::vector<BlockId> leaving() const {
    std::vector<BlockId> blocks;
    for (const BlockRequest& request : policy_.leaving())
      for (const BlockTable& table : request.tables)
        blocks.insert(blocks.end(), table.columns.begin(), table.columns.end());
    return blocks;
  }

  /// Blocks that copies from and to the host's blocks refer to.
  std::vector<BlockId> held() const {
    const SimpleTier* const simple = policy_.simple();
    return simple == nullptr ? std::vector<BlockId>() : held_by_copies(*simple).device;
  }

  void follow_table(std::vector<BlockId>& known, const std::vector<BlockId>& now) {
    for (std::size_t i = 0; i < std::max(known.size(), now.size()); ++i) {
      const BlockId old = i < known.size() ? known[i] : kNullBlock;
      const BlockId block = i < now.size() ? now[i] : kNullBlock;
      if (old == block) continue;
      count(old, -1);
      count(block, 1);
      if (block >= records_.size())
        report(FindingKind::out_of_range, fmt::format("column {} of a table is block {}", i, block),
               fmt::format("a block below {}", records_.size()), std::to_string(block));
    }
    known = now;
  }

  /// A1 and A2 of what changed.
  void check_changed() {
    for (const BlockId block : changed_) check_block(block);
    for (const BlockId block : changed_) records_[block].is_changed = false;
  }
  void check_block(BlockId block) {
    const std::int32_t expected = records_[block].references;
    const std::int32_t actual = pool_.references(block);
    if (actual != expected)
      report(FindingKind::lock_imbalance,
             fmt::format("block {} has {}, and tables and copies refer to it {}", block,
                         counted(actual, "reference"), counted(expected, "time")),
             std::to_string(expected), std::to_string(actual));
  }

  /// A3 and A4.
  void check_queue() {
    std::vector<BlockId> popped, first, last;
    for (const BlockId block : changed_) {
      const Record& record = records_[block];
      if (record.before > 0 && record.references == 0)
        (pool_.has_key(block) ? last : first).push_back(block);
      if (record.before != 0 || record.references == 0) continue;
      const bool is_hit =
          record.was_keyed && pool_.has_key(block) && pool_.primary(block).key == record.key;
      if (is_hit)
        unlink(block);
      else
        popped.push_back(block);
    }
    check_popped(popped);
    check_end(first, true);
    check_end(last, false);
    if (pool_.free_count() != queue_size_)
      report(FindingKind::size_accounting,
             fmt::format("{} {} free, and the pool counts {}", counted(queue_size_, "block"),
                         is_or_are(queue_size_), pool_.free_count()),
             std::to_string(queue_size_), std::to_string(pool_.free_count()));
  }

  void check_popped(const std::vector<BlockId>& popped) {
    for (std::size_t i = 0; i < popped.size(); ++i) {
      const BlockId head = records_[kNullBlock].next;
      if (std::ranges::find(popped, head) == popped.end()) {
        report(FindingKind::lru_order,
               fmt::format("a block was taken while block {} stood at the head of the free queue",
                           head),
               fmt::format("block {}", head), fmt::format("block {}", popped[i]));
        return read_queue();
      }
      unlink(head);
    }
  }

  /// The blocks that were given back stand at that end of the queue; the others before or after
  /// them, as they were.
  void check_end(const std::vector<BlockId>& given, bool is_head) {
    const auto step = [&](BlockId block) {
      return is_head ? pool_.next_free(block) : pool_.previous_free(block);
    };
    BlockId at = is_head ? pool_.first_free() : pool_.last_free();
    BlockId place = is_head ? kNullBlock : records_[kNullBlock].previous;
    const BlockId neighbour = is_head ? records_[kNullBlock].next : place;
    for (std::size_t i = 0; i < given.size(); ++i, at = step(at)) {
      if (std::ranges::find(given, at) == given.end()) {
        report(FindingKind::lru_order,
               fmt::format("blocks {} a key were given back, and block {} is among the {} of the "
                           "free queue",
                           is_head ? "without" : "with", at, is_head ? "first" : "last"),
               fmt::format("block {}", given.front()), fmt::format("block {}", at));
        return read_queue();
      }
      insert_behind(is_head ? std::exchange(place, at) : place, at);
    }
    if (!given.empty() && neighbour != kNullBlock && at != neighbour) {
      report(FindingKind::lru_order,
             fmt::format("block {} changed its place in the free queue and was not taken", at),
             fmt::format("block {}", neighbour), fmt::format("block {}", at));
      read_queue();
    }
  }

  // --- The CPU tier ------------------------------------------------------------------------------

  void check_tier(const OffloadTier& tier) {
    std::map<ChunkKey, std::int32_t> uses;  // -1: a store writes it
    const auto collect = [&](const auto& jobs) {
      for (const OffloadTier::Job& job : jobs)
        for (const ChunkKey& key : job.keys)
          if (!tier.is_stale(job)) uses[key] += job.is_load ? 1 : -1;
    };
    collect(tier.waiting());
    collect(tier.stores());
    collect(tier.new_loads());
    collect(tier.loads());
    if (tier.disk() != nullptr) {
      const auto collect_disk = [&](const auto& jobs, std::int32_t use) {
        for (const DiskTier::Job& job : jobs)
          for (const ChunkKey& key : job.keys) uses[key] += use;
      };
      collect_disk(tier.disk()->cascades, 1);
      collect_disk(tier.disk()->promotions, -1);
      collect_disk(tier.disk()->asked, -1);
    }
    const BlockRules& rules = policy_.manager().rules();
    std::vector<char> seen(static_cast<std::size_t>(rules.cpu_chunks));
    for (const auto& [key, chunk] : tier.chunks().all()) {
      const auto named = [key = key] {
        return fmt::format("the chunk of group {} for {}", key.group, counted(key.tokens, "token"));
      };
      if (chunk.index >= seen.size() || seen[chunk.index]++ != 0)
        report(FindingKind::slot_in_two_places,
               fmt::format("{} lies at place {}, as another one does", named(), chunk.index),
               "a place of its own", "a shared one");
      if (chunk.readers != uses[key])
        report(FindingKind::lock_imbalance,
               fmt::format("{} counts {} (-1: it is written)", named(),
                           counted(chunk.readers, "copy", "copies")),
               std::to_string(uses[key]), std::to_string(chunk.readers));
      else if (chunk.is_ready())
        check_chunk(tier, key, chunk.index);
    }
    const std::int64_t all = std::ssize(tier.chunks().all()) + tier.chunks().free_count();
    if (all != rules.cpu_chunks)
      report(FindingKind::leak, "chunks are neither free nor of a key",
             std::to_string(rules.cpu_chunks), std::to_string(all));
    check_loads();
    take_worker_findings();
  }

  void check_simple(const SimpleTier& tier) {
    for (Finding& finding : check_host_blocks(tier, labels_))
      findings_->push_back(std::move(finding));
    for (const VllmRequest& request : policy_.requests())
      if (request.id.exists() && request.is_loading)
        for (Finding& finding : check_load(tier, request.blocks, policy_.manager().rules()))
          findings_->push_back(std::move(finding));
    check_loads();
    take_worker_findings();
  }

  /// Calls `use` with each column that the chunk stands for, and the tokens up to its end.
  template <class Use>
  void each_column(const ChunkKey& key, Use use) const {
    const BlockRules& rules = policy_.manager().rules();
    const GroupSpec& spec = rules.groups[key.group];
    const std::int64_t end = ceil_div(key.tokens, spec.block);
    const std::int64_t count = is_state(spec.kind) ? 1 : rules.blocks_per_chunk;
    for (std::int64_t column = end - count; column < end; ++column)
      use(column, std::min<std::int64_t>(key.tokens, (column + 1) * spec.block));
  }

  void check_chunk(const OffloadTier& tier, const ChunkKey& key, std::uint32_t chunk) {
    each_column(key, [&](std::int64_t column, std::int64_t tokens) {
      labels_.check_chunk(tier.host_block(chunk, column), key.group, key.key, tokens);
    });
  }

  // --- The disk ----------------------------------------------------------------------------------

  void check_disk(const Operation& operation, const Reply& reply, const OffloadTier& tier) {
    const std::int64_t per_chunk = policy_.manager().rules().blocks_per_chunk;
    if (operation.verb == Verb::evict || operation.verb == Verb::fail) on_disk_.clear();
    for (const auto& [key, contents] : tier.disk()->chunks())
      if (on_disk_.insert(key).second)
        each_column(
            key, [&, &key = key, &contents = contents](std::int64_t column, std::int64_t tokens) {
              labels_.check_content(contents[static_cast<std::size_t>(column % per_chunk)],
                                    key.group, key.key, tokens);
            });
    take_worker_findings();
    check_progress(operation, reply, tier);
    is_quiet_ = !policy_.has_scheduled() && tier.waiting().empty() && tier.stores().empty() &&
                tier.loads().empty() && tier.new_loads().empty() && tier.sees_disk_copies();
  }

  void check_progress(const Operation& operation, const Reply& reply, const OffloadTier& tier) {
    switch (operation.verb) {
      case Verb::land:
      case Verb::settle:
      case Verb::step:
      case Verb::check: return;
      default: break;
    }
    const auto asked = policy_.asked().find(operation.id.index());
    const bool is_refused = operation.verb == Verb::admit && reply.refused != Refusal::none &&
                            asked != policy_.asked().end();
    if (!is_refused || asked->second.admission != refused_.admission) refused_ = {};
    if (!is_refused || !is_quiet_) return;
    const Refused before = std::exchange(
        refused_, {asked->second.admission, std::ssize(tier.chunks_of(asked->second.blocks)),
                   tier.last_job()});
    if (refused_.admission == before.admission && refused_.last_job == before.last_job &&
        refused_.chunks <= before.chunks)
      report(
          FindingKind::stuck,
          fmt::format("request `{}` was refused, all copies have landed, and it is refused again "
                      "with no more of its chunks on the host",
                      operation.id.text()),
          fmt::format("more than {}", counted(before.chunks, "chunk")),
          counted(refused_.chunks, "chunk"));
  }

  void check_loads() {
    const OffloadTier* const tier = policy_.tier();
    const SimpleTier* const simple = policy_.simple();
    const auto has_load = [&](OffloadTier::RequestId id) {
      const auto is_its = [&](const OffloadTier::Job& job) { return job.request == id; };
      const auto has = [&](const OffloadTier& of) {
        return of.is_loaded(id) || std::ranges::any_of(of.loads(), is_its) ||
               std::ranges::any_of(of.new_loads(), is_its);
      };
      return (tier != nullptr && has(*tier)) ||
             (simple != nullptr && (simple->is_loaded(id) || load_of(*simple, id) != nullptr));
    };
    const auto check = [&](OffloadTier::RequestId id, const std::string& name) {
      if (!has_load(id))
        report(FindingKind::stuck, fmt::format("{} waits for a load, and there is none", name),
               "a copy in flight", "none");
    };
    for (const VllmRequest& request : policy_.requests())
      if (request.id.exists() && request.is_loading)
        check(request.blocks.offload, fmt::format("request `{}`", request.id.text()));
    for (const BlockRequest& request : policy_.leaving())
      check(request.offload, "a request that has left");
  }

  // --- Everything, from nothing ------------------------------------------------------------------

  void recount_references() {
    std::vector<std::int32_t> uses(records_.size());
    for (const BlockCopy& copy : policy_.manager().copies()) {
      ++uses[copy.source];
      ++uses[copy.target];
    }
    for (const BlockId block : held()) ++uses[block];
    std::vector<std::int32_t> tables(records_.size());
    for (const BlockId block : leaving())
      if (block != kNullBlock) ++uses[block], ++tables[block];
    for (const VllmRequest& request : policy_.requests()) {
      if (!request.id.exists() || !request.blocks.runs) continue;
      for (const BlockTable& table : request.blocks.tables)
        for (const BlockId block : table.columns)
          if (block != kNullBlock) ++uses[block], ++tables[block];
    }
    for (BlockId block = 0; block < records_.size(); ++block) {
      if (block != kNullBlock && tables[block] > 1 && !pool_.has_key(block))
        report(FindingKind::slot_in_two_places,
               fmt::format("block {} stands in {}, and no key says what it holds", block,
                           counted(tables[block], "table")),
               "one table", std::to_string(tables[block]));
      if (pool_.references(block) != uses[block])
        report(FindingKind::lock_imbalance,
               fmt::format("block {} has {}, and tables and copies refer to it {}", block,
                           counted(pool_.references(block), "reference"),
                           counted(uses[block], "time")),
               std::to_string(uses[block]), std::to_string(pool_.references(block)));
    }
  }

  void recount_queue() {
    std::vector<bool> is_free(records_.size());
    std::size_t size = 0;
    for (BlockId block = pool_.first_free(); block != kNullBlock;
         block = pool_.next_free(block), ++size) {
      if (block >= is_free.size() || is_free[block])
        return report(FindingKind::slot_in_two_places,
                      fmt::format("block {} stands twice in the free queue", block), "once",
                      "twice");
      is_free[block] = true;
      if (pool_.references(block) > 0)
        return report(FindingKind::freed_slot_in_use,
                      fmt::format("block {} is in the free queue and has references", block),
                      "one or the other", "both");
    }
    for (BlockId block = 1; block < is_free.size(); ++block)
      if (!is_free[block] && pool_.references(block) == 0)
        return report(FindingKind::leak,
                      fmt::format("nobody refers to block {}, and it is not free", block),
                      "in the free queue", "nowhere");
    if (size != pool_.free_count())
      report(FindingKind::size_accounting,
             fmt::format("{} {} free, and the pool counts {}", counted(size, "block"),
                         is_or_are(size), pool_.free_count()),
             std::to_string(size), std::to_string(pool_.free_count()));
  }

  /// A5 and A6.
  void recount_keys() {
    if (pool_.has_key(kNullBlock))
      report(FindingKind::out_of_range, "the null block has a key", "none", "a key");
    std::size_t held = 0;
    for (BlockId block = 1; block < records_.size(); ++block)
      for (const BlockPool::Entry& entry : pool_.entries_of(block)) {
        ++held;
        const std::vector<BlockId> holders = pool_.blocks_of(entry.group, entry.key);
        const auto times = std::ranges::count(holders, block);
        if (times != 1 || entry.block != block)
          return report(
              FindingKind::size_accounting,
              fmt::format(
                  "block {} has a key of group {} for {}, and the index names it {} for that key",
                  block, entry.group, counted(entry.tokens, "token"), counted(times, "time")),
              "1", std::to_string(times));
      }
    if (const std::size_t indexed = pool_.indexed_keys(); indexed != held)
      report(FindingKind::size_accounting,
             fmt::format("the index has {} of blocks, and the blocks have {}",
                         counted(indexed, "key"), held),
             std::to_string(held), std::to_string(indexed));
  }

  VllmPolicy& policy_;
  const BlockPool& pool_;
  LabelBlocks& labels_;
  std::vector<Record> records_;
  std::vector<Table> tables_;  // by Name::index()
  std::vector<BlockCopy> copies_;
  std::vector<BlockId> leaving_;
  std::vector<BlockId> held_;
  std::set<ChunkKey> on_disk_;  // whose content was compared
  Refused refused_;
  bool is_quiet_ = true;  // no copy is in flight, or the next look-up sees that it is not
  std::vector<BlockId> changed_;
  std::size_t queue_size_ = 0;
  Findings* findings_ = nullptr;
};

const Registration<AuditorEntry> kVllmAuditor{
    {"vllm-align", [](Subject& subject, const LabelState* /*labels*/) -> std::unique_ptr<Auditor> {
       auto* const policy = dynamic_cast<VllmPolicy*>(&subject);
       if (policy == nullptr) return nullptr;
       return std::make_unique<VllmAuditor>(*policy);
     }}};

}  // namespace
}  // namespace lockstep::cache_sim
