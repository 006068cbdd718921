// Checks invariants of the pool and the tables of vLLM's block cache, and reports what the worker
// found wrong in the blocks (label_blocks.hpp). It keeps tables, reference counts and the
// free queue a second time and shares none of the policy's decisions:
//
//   A1  a block's references are its columns in tables, and 1 for each end of a copy that is queued
//   A2  a block is in the free queue exactly where nobody refers to it; the count says how many are
//   A3  blocks are popped from the head of the queue; a block that a hit takes leaves from anywhere
//   A4  a block that is given back goes to the tail where it has a key, else to the head
//   A5  the index of keys and the keys of the blocks are the same, and no key is there twice
//   A6  the null block has no key and no reference
//   A7  a block stands once in a table of a group, and in two tables only where it has a key
//
// After each operation it looks at the blocks whose references changed; recompute() at everything.
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

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

  void after(const Operation& operation, const Reply& /*reply*/, Findings& findings) override {
    findings_ = &findings;
    take_worker_findings();
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

  void report(FindingKind kind, std::string text, std::string expected, std::string actual) {
    if (findings_->size() < kMostFindings)
      findings_->push_back({kind, std::move(text), std::move(expected), std::move(actual)});
  }

  void take_worker_findings() {
    for (Finding& finding : policy_.take_findings()) findings_->push_back(std::move(finding));
  }

  // --- The free queue, kept a second time
  // ---------------------------------------------------------

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

  // --- After an operation
  // -------------------------------------------------------------------------

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
      if (std::find(popped.begin(), popped.end(), head) == popped.end()) {
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
      if (std::find(given.begin(), given.end(), at) == given.end()) {
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

  // --- Everything, from nothing
  // -------------------------------------------------------------------

  void recount_references() {
    std::vector<std::int32_t> uses(records_.size());
    for (const BlockCopy& copy : policy_.manager().copies()) {
      ++uses[copy.source];
      ++uses[copy.target];
    }
    std::vector<std::int32_t> tables(records_.size());
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
        const auto times = std::count(holders.begin(), holders.end(), block);
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
