// Marconi's invariants: each slot has one owner, states and KV stand for the prefixes of their
// nodes, locks are those of the running requests, sizes are what counting gives, and every node can
// still be used. Everything is recounted from nothing, after every operation where the tree is
// small.
#include <fmt/format.h>

#include <string>
#include <utility>
#include <vector>

#include "cache_sim/model/label_state.hpp"
#include "cache_sim/policies/marconi/marconi_policy.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/zeroed_array.hpp"

namespace lockstep::cache_sim {
namespace {

class MarconiAuditor final : public Auditor {
 public:
  MarconiAuditor(const MarconiPolicy& policy, const LabelState* labels)
      : policy_(policy),
        labels_(labels),
        kv_owner_(static_cast<std::size_t>(policy.kv_pool().slot_count()) + 1),
        state_owner_(static_cast<std::size_t>(policy.state_pool().slot_count()) + 1) {}

  void after(const Operation& /*operation*/, const Reply& /*reply*/, Findings& findings) override {
    constexpr std::int64_t kSmall = 4096;  // tokens
    if (policy_.tree().tokens() <= kSmall) recompute(findings);
  }

  void recompute(Findings& findings) override {
    findings_ = &findings;
    owners_.assign(1, "nobody");
    kv_owner_.reset();
    state_owner_.reset();
    locks_.assign(policy_.tree().node_count(), 0);
    sums_ = {};
    for (MarconiTree::Index i = 1; i < policy_.tree().node_count(); ++i)
      if (policy_.tree().node(i).alive) check_node(i);
    for (const MarconiRequest& request : policy_.requests())
      if (request.id.exists()) check_request(request);
    check_locks();
    check_sums();
  }

 private:
  struct Sums {
    std::int64_t tokens = 0, states = 0, locked_tokens = 0, locked_states = 0;
    std::int64_t own_tokens = 0, running = 0;
    std::int64_t owned_kv = 0, owned_states = 0;  // slots
  };
  using Owner = std::uint32_t;  // index into owners_; 0: nobody

  void report(FindingKind kind, std::string text, std::string expected, std::string actual) {
    findings_->push_back({kind, std::move(text), std::move(expected), std::move(actual)});
  }
  template <class T>
  void check_equal(FindingKind kind, const std::string& what, T expected, T actual) {
    if (expected != actual)
      report(kind, fmt::format("{} is {} where counting gives {}", what, actual, expected),
             std::to_string(expected), std::to_string(actual));
  }

  std::string name_of(const MarconiTree::Node& node) const {
    return fmt::format("the node at {}", node.path.text(40));
  }

  Owner add_owner(std::string name) {
    owners_.push_back(std::move(name));
    return static_cast<Owner>(owners_.size() - 1);
  }

  /// False where another has the slot, or nobody may have it.
  bool own(const char* kind, ZeroedArray<Owner>& owner_of, std::uint32_t slot, bool is_in_use,
           Owner owner) {
    if (owner_of[slot] != 0) {
      report(FindingKind::slot_in_two_places,
             fmt::format("{} slot {} belongs to {} and to {}", kind, slot, owners_[owner_of[slot]],
                         owners_[owner]),
             "one owner", "two");
      return false;
    }
    owner_of[slot] = owner;
    if (is_in_use) return true;
    report(FindingKind::freed_slot_in_use,
           fmt::format("{} slot {} is free and belongs to {}", kind, slot, owners_[owner]),
           "one or the other", "both");
    return false;
  }

  void own_state(StateSlot slot, Owner owner) {
    const bool is_in_use =
        labels_ == nullptr || !labels_->state_exists(slot) || labels_->state_in_use(slot);
    if (own("state", state_owner_, slot.value, is_in_use, owner)) ++sums_.owned_states;
  }
  void check_label(StateSlot slot, const Tokens& tokens, std::uint32_t size,
                   const std::string& owner) {
    if (labels_ == nullptr || !labels_->state_exists(slot)) return;
    const Label expected = label_of(tokens, size);
    for (const StatePart part : kStateParts)
      if (labels_->label(slot, part) != expected)
        report(FindingKind::wrong_state_prefix,
               fmt::format("the {} state of {} stands for {}", to_string(part), owner,
                           labels_->label(slot, part).text()),
               expected.text(), labels_->label(slot, part).text());
  }

  /// The slots of tokens[begin, begin + size of the runs), written up to `written`.
  void own_kv(const KvRuns& runs, const Tokens& tokens, std::uint32_t begin, std::uint32_t written,
              Owner owner) {
    fingerprints_.resize(labels_ == nullptr ? 0 : written - begin);
    tokens.prefix_fingerprints(begin, begin + static_cast<std::uint32_t>(fingerprints_.size()),
                               fingerprints_);
    std::size_t at = 0;
    for (const KvRun& run : runs)
      for (const std::uint32_t slot : run.slots()) {
        if (!own("KV", kv_owner_, slot, labels_ == nullptr || labels_->kv_in_use(slot), owner))
          return;
        ++sums_.owned_kv;
        if (at < fingerprints_.size() && labels_->kv_fingerprint(slot) != fingerprints_[at])
          return report(FindingKind::wrong_state_prefix,
                        fmt::format("the KV of token {} of {} is that of another prefix",
                                    begin + at, owners_[owner]),
                        tokens.prefix(begin + static_cast<std::uint32_t>(at) + 1).text(40),
                        "another");
        ++at;
      }
  }
  static std::int64_t size_of(const KvRuns& runs) {
    std::int64_t size = 0;
    for (const KvRun& run : runs) size += run.size;
    return size;
  }

  void check_node(MarconiTree::Index index) {
    const MarconiTree::Node& node = policy_.tree().node(index);
    const std::string name = name_of(node);
    if (!policy_.tree().node(node.parent).alive ||
        policy_.tree().node(node.parent).end != node.begin)
      report(FindingKind::tombstone_rule, fmt::format("{} hangs on nothing", name), "a parent",
             "none");
    if (!node.has_state && node.child_count < 2)
      report(FindingKind::tombstone_rule,
             fmt::format("{} has neither a state nor two children", name), "no such node",
             counted(node.child_count, "child", "children"));
    check_equal<std::int64_t>(FindingKind::size_accounting, "the KV of " + name, node.edge_size(),
                              size_of(node.kv));
    const Owner owner = add_owner(name);
    own_kv(node.kv, node.path, node.begin, node.end, owner);
    if (node.has_state) {
      own_state(node.state, owner);
      check_label(node.state, node.path, node.end, name);
    }
    if (node.time > policy_.tree().clock())
      report(FindingKind::lru_order, fmt::format("{} was used in the future", name), "the past",
             std::to_string(node.time));
    sums_.tokens += node.edge_size();
    sums_.states += node.has_state ? 1 : 0;
  }

  void check_request(const MarconiRequest& request) {
    const std::string name = fmt::format("request `{}`", request.id.text());
    const MarconiTree::Node& used = policy_.tree().node(request.used);
    if (!used.alive || used.end != request.owned)
      return report(FindingKind::evicted_while_locked,
                    fmt::format("{} uses {} that the cache has lost", name,
                                counted(request.owned, "stored token")),
                    "a node", "none");
    check_equal<std::int64_t>(FindingKind::size_accounting, "the row of " + name, request.allocated,
                              size_of(request.kv));
    KvRuns own;
    append_slice(own, request.kv, request.owned, request.allocated);
    const Owner owner = add_owner(name);
    own_kv(own, request.known, request.owned, request.computed, owner);
    own_state(request.live, owner);
    check_label(request.live, request.known, request.computed, name);
    for (MarconiTree::Index node = request.used; node != MarconiTree::kRoot;
         node = policy_.tree().node(node).parent)
      ++locks_[node];
    sums_.own_tokens += request.allocated - request.owned;
    ++sums_.running;
  }

  void check_locks() {
    for (MarconiTree::Index i = 1; i < locks_.size(); ++i) {
      const MarconiTree::Node& node = policy_.tree().node(i);
      if (!node.alive) continue;
      check_equal<std::int64_t>(FindingKind::lock_imbalance, "the lock count of " + name_of(node),
                                locks_[i], node.locks);
      if (locks_[i] == 0) continue;
      sums_.locked_tokens += node.edge_size();
      sums_.locked_states += node.has_state ? 1 : 0;
    }
  }

  void check_sums() {
    const MarconiTree& tree = policy_.tree();
    const MarconiSizes& sizes = policy_.sizes();
    constexpr FindingKind kSize = FindingKind::size_accounting;
    check_equal(kSize, "the count of stored tokens", sums_.tokens, tree.tokens());
    check_equal(kSize, "the count of stored states", sums_.states, tree.states());
    check_equal(kSize, "the count of locked tokens", sums_.locked_tokens, tree.locked_tokens());
    check_equal(kSize, "the count of locked states", sums_.locked_states, tree.locked_states());
    const std::int64_t used = (sums_.tokens + sums_.own_tokens) * sizes.token_bytes +
                              (sums_.states + sums_.running) * sizes.state_bytes;
    check_equal(kSize, "the count of free bytes", sizes.capacity - used, policy_.free_bytes());
    if (used > sizes.capacity)
      report(kSize, "more bytes are in use than there are", std::to_string(sizes.capacity),
             std::to_string(used));
    const auto check_pool = [&](const char* what, std::int64_t free, std::int64_t owned,
                                std::int64_t total) {
      if (free + owned != total)
        report(FindingKind::leak,
               fmt::format("of {} {}, {} are free and {} have an owner", total, what, free, owned),
               std::to_string(total), std::to_string(free + owned));
    };
    check_pool("KV slots", policy_.kv_pool().free_count(), sums_.owned_kv,
               policy_.kv_pool().slot_count());
    check_pool("state slots", policy_.state_pool().free_count(), sums_.owned_states,
               policy_.state_pool().slot_count());
  }

  const MarconiPolicy& policy_;
  const LabelState* labels_;
  Findings* findings_ = nullptr;
  std::vector<std::string> owners_;
  ZeroedArray<Owner> kv_owner_, state_owner_;  // by slot
  std::vector<std::uint64_t> fingerprints_;
  std::vector<std::int64_t> locks_;
  Sums sums_;
};

const Registration<AuditorEntry> kMarconiAuditor{
    {"marconi", [](Subject& subject, const LabelState* labels) -> std::unique_ptr<Auditor> {
       const auto* const policy = dynamic_cast<const MarconiPolicy*>(&subject);
       if (policy == nullptr) return nullptr;
       return std::make_unique<MarconiAuditor>(*policy, labels);
     }}};

}  // namespace
}  // namespace lockstep::cache_sim
