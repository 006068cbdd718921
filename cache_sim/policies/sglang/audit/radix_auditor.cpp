#include "cache_sim/policies/sglang/audit/radix_auditor.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "reference/base/counted.hpp"
#include "reference/base/require.hpp"

namespace lockstep::cache_sim {
namespace {
constexpr std::size_t kMostFindings = 8;  // of one operation: the first is the one that counts

/// Equal slots in equal order, however they are cut into runs.
bool same_slots(const KvRuns& a, const KvRuns& b) {
  std::size_t i = 0;
  std::size_t j = 0;
  std::uint32_t in_a = 0;
  std::uint32_t in_b = 0;
  while (i < a.size() && j < b.size()) {
    const std::uint32_t piece = std::min(a[i].size - in_a, b[j].size - in_b);
    const std::uint32_t* const left = a[i].slots().data() + in_a;
    const std::uint32_t* const right = b[j].slots().data() + in_b;
    if (left != right && !std::equal(left, left + piece, right)) return false;
    if ((in_a += piece) == a[i].size) in_a = 0, ++i;
    if ((in_b += piece) == b[j].size) in_b = 0, ++j;
  }
  return i == a.size() && j == b.size();
}

std::string slot_text(StateSlot slot) {
  return slot.exists() ? fmt::format("slot {}", slot.value) : "no state";
}

}  // namespace

/// The slots from `first` to `last`, counted from the runs' start, appended.
void RadixAuditor::cut(const KvRuns& runs, std::uint32_t first, std::uint32_t last, KvRuns& onto) {
  std::uint32_t at = 0;
  for (const KvRun& run : runs) {
    const std::uint32_t begin = std::max(first, at);
    const std::uint32_t end = std::min(last, at + run.size);
    if (begin < end) onto.push_back({run.array, run.begin + (begin - at), end - begin});
    at += run.size;
  }
  require(last <= at, "runs are as long as what is said to lie in them");
}

RadixAuditor::RadixAuditor(SglangPolicy& policy, const LabelState* labels)
    : policy_(policy),
      rules_(policy.variant()),
      labels_(labels),
      has_states_(policy.has_states()),
      kv_owner_(
          static_cast<std::size_t>(policy.kv_pool().first_slot() + policy.kv_pool().slot_count())),
      state_owner_(static_cast<std::size_t>(policy.state_pool().first_slot() +
                                            policy.state_pool().slot_count())) {
  policy_.audited_tree().start_auditing();
  nodes_.resize(1);
}

std::string RadixAuditor::name_of(NodeIndex node) const {
  if (node == kRoot) return "the root";
  const Tokens& path = nodes_[node.value].exists() ? nodes_[node.value].path : actual(node).path;
  return fmt::format("the node at {} ({})", path.text(40), counted(path.size(), "token"));
}

std::string RadixAuditor::owner_name(Owner owner) const {
  const std::uint32_t index = owner & kIndexMask;
  switch (owner & ~kIndexMask) {
    case kOfNode: return name_of({index});
    case kOfRequest: return fmt::format("request `{}`", requests_[index].id.text());
    case kOfHeld: return "a held slot";
    default: return "nobody";
  }
}

void RadixAuditor::report(FindingKind kind, std::string text, std::string expected,
                          std::string actual) {
  if (findings_->size() < kMostFindings)
    findings_->push_back({kind, std::move(text), std::move(expected), std::move(actual)});
}

bool RadixAuditor::is_same_node(NodeIndex node) const {
  return actual(node).alive && nodes_[node.value].serial == actual(node).serial;
}

// --- Slots ---------------------------------------------------------------------------------------

void RadixAuditor::own_kv(const KvRuns& runs, Owner owner) {
  for (const KvRun& run : runs) {
    for (const std::uint32_t slot : run.slots()) {
      if (slot < kv_owner_.size() && kv_owner_[slot] == 0 &&
          (labels_ == nullptr || labels_->kv_in_use(slot))) [[likely]]
        kv_owner_[slot] = owner;
      else
        refuse_kv(slot, owner);
    }
    owned_kv_ += run.size;
  }
}

/// Reports a slot that its holder cannot own, and subtracts it from the count of owned slots.
void RadixAuditor::refuse_kv(std::uint32_t slot, Owner owner) {
  --owned_kv_;
  if (slot >= kv_owner_.size())
    report(FindingKind::out_of_range, fmt::format("{} holds KV slot {}", owner_name(owner), slot),
           fmt::format("a slot below {}", kv_owner_.size()), std::to_string(slot));
  else if (kv_owner_[slot] != 0)
    report(FindingKind::slot_in_two_places,
           fmt::format("KV slot {} belongs to {} and to {}", slot, owner_name(kv_owner_[slot]),
                       owner_name(owner)),
           "one owner", "two");
  else
    report(FindingKind::freed_slot_in_use,
           fmt::format("KV slot {} is free and belongs to {}", slot, owner_name(owner)),
           "one or the other", "both");
}

void RadixAuditor::disown_kv(const KvRuns& runs, Owner owner) {
  for (const KvRun& run : runs)
    for (const std::uint32_t slot : run.slots()) {
      if (slot >= kv_owner_.size() || kv_owner_[slot] != owner) continue;
      kv_owner_[slot] = 0;
      --owned_kv_;
    }
}

void RadixAuditor::own_state(StateSlot slot, Owner owner) {
  if (!slot.exists()) return;
  if (slot.value == 0 || slot.value >= state_owner_.size()) {
    report(FindingKind::out_of_range,
           fmt::format("{} holds state slot {}", owner_name(owner), slot.value),
           fmt::format("a slot from 1 to {}", state_owner_.size() - 1), std::to_string(slot.value));
    return;
  }
  Owner& now = state_owner_[slot.value];
  if (now != 0) {
    report(FindingKind::slot_in_two_places,
           fmt::format("state slot {} belongs to {} and to {}", slot.value, owner_name(now),
                       owner_name(owner)),
           "one owner", "two");
    return;
  }
  if (labels_ != nullptr && !labels_->state_in_use(slot)) {
    report(FindingKind::freed_slot_in_use,
           fmt::format("state slot {} is free and belongs to {}", slot.value, owner_name(owner)),
           "one or the other", "both");
    return;
  }
  now = owner;
  ++owned_states_;
}

void RadixAuditor::disown_state(StateSlot slot, Owner owner) {
  if (!slot.exists() || slot.value >= state_owner_.size() || state_owner_[slot.value] != owner)
    return;
  state_owner_[slot.value] = 0;
  --owned_states_;
}

// --- Following an operation ----------------------------------------------------------------------

void RadixAuditor::after(const Operation& operation, const Reply& reply, Findings& findings) {
  findings_ = &findings;
  ++operation_;
  collect_touched();
  if (policy_.host() != nullptr) release_settled();
  given_up_ = given_up_state(operation);
  // The match of an admission is looked up while the nodes that it then evicted are on record.
  if (operation.verb == Verb::admit && policy_.host() != nullptr) {
    matched_ = longest_state(operation.tokens, operation.tokens.size() - 1, operation.salt);
    fetched_ = longest_fetched(operation);
  }
  // Everything that moved leaves its old owner before anything gets a new one: a slot may pass
  // between two of them.
  for (Touched& touched : touched_) bury(touched);
  if (operation.id.exists()) follow_request(operation);
  for (std::size_t i = 0; i < held_slots_.size(); ++i)
    disown_state(held_slots_[i].slot, kOfHeld | static_cast<std::uint32_t>(i));
  for (const Touched& touched : touched_) take_over(touched);
  reparent();
  if (operation.id.exists()) check_request(operation);
  follow_held();
  if (policy_.host() != nullptr) follow_copies();
  if (has_states_) note_use(operation, reply);
  for (const Touched& touched : touched_) check_node(touched.node);
  check_totals();
  if (policy_.host() != nullptr) check_host();
  if (policy_.windows() != nullptr) check_windows();
}

void RadixAuditor::collect_touched() {
  touched_.clear();
  born_.clear();
  bereft_.clear();
  cut_.clear();
  nodes_.resize(policy_.tree().node_count());
  stamp_.resize(nodes_.size());
  std::vector<NodeTouch>& touches = policy_.audited_tree().touched();
  for (const NodeTouch& touch : touches) {
    if (touch.node == kRoot) continue;
    if (stamp_[touch.node.value] != operation_) {
      stamp_[touch.node.value] = operation_;
      touched_.push_back({touch.node, touch.kv, record(touch.node).child_count});
    } else if (touch.kv) {
      std::ranges::find(touched_, touch.node, &Touched::node)->kv = true;
    }
  }
  touches.clear();
}

/// Adds a node that only the holders or the uses concern, after the policy's own touches were
/// collected.
void RadixAuditor::touch(NodeIndex node) {
  if (stamp_[node.value] == operation_) return;
  stamp_[node.value] = operation_;
  account(record(node), -1);
  touched_.push_back({node, false, 0});
}

/// Whether `now` is the end of `old`, slot by slot.
bool RadixAuditor::keeps_tail(const KvRuns& old, const KvRuns& now) {
  const auto size = [](const KvRuns& runs) {
    std::uint32_t sum = 0;
    for (const KvRun& run : runs) sum += run.size;
    return sum;
  };
  const std::uint32_t all = size(old);
  const std::uint32_t kept = size(now);
  if (kept > all) return false;
  scratch_.clear();
  cut(old, all - kept, all, scratch_);
  return same_slots(scratch_, now);
}

/// Takes a touched node's record out of the counts; where the node is gone, out of the records too.
void RadixAuditor::bury(Touched& touched) {
  const NodeIndex node = touched.node;
  NodeRecord& old = record(node);
  if (!old.exists()) return;
  account(old, -1);
  if (node == given_up_) --old.state_locks;
  const bool gone = !is_same_node(node);
  const RadixNode& now = actual(node);
  if (gone && (old.full_locks != 0 || old.state_locks != 0))
    report(FindingKind::evicted_while_locked,
           fmt::format("{} was evicted although it is locked", name_of(node)), "the node stays",
           "it is gone");
  if (!gone && old.state.exists() && !now.state.exists()) {
    if (old.state_locks != 0)
      report(FindingKind::evicted_while_locked,
             fmt::format("the state of {} was evicted although it is locked", name_of(node)),
             "the state stays", "it is gone");
    if (touched.children_before == 0 && now.child_count == 0 && old.full_locks == 0 &&
        !now.kv.empty())
      report(FindingKind::tombstone_rule,
             fmt::format("{} lost its state and kept its KV although it is an unlocked leaf: "
                         "nothing can use that KV",
                         name_of(node)),
             "the leaf goes whole", "a tombstone");
  }
  if (!gone && old.full_locks != 0 && !old.kv.empty() && now.kv.empty())
    report(FindingKind::evicted_while_locked,
           fmt::format("the KV of {} left the device although it is locked", name_of(node)),
           "it stays", "it is gone");
  if (gone || old.state != now.state) disown_state(old.state, kOfNode | node.value);
  if (gone || touched.kv) {
    // A split leaves the lower part of the edge where it is: only the upper part changes hands.
    touched.kept_kv =
        !gone && !now.kv.empty() && now.edge_size() < old.edge_size && keeps_tail(old.kv, now.kv);
    if (touched.kept_kv) {
      scratch_.clear();
      cut(old.kv, 0, old.edge_size - now.edge_size(), scratch_);
    }
    disown_kv(touched.kept_kv ? scratch_ : old.kv, kOfNode | node.value);
  }
  if (!gone) return;
  if (old.parent != kRoot && record(old.parent).exists()) {
    --record(old.parent).child_count;
    bereft_.push_back(old.parent);
  }
  node_by_digest_.erase(digest_key(old.label.digest, old.label.size, old.salt));
  old = NodeRecord{};
}

/// Brings a touched node's record up to what the policy holds now.
void RadixAuditor::take_over(const Touched& touched) {
  const NodeIndex node = touched.node;
  const RadixNode& now = actual(node);
  if (!now.alive) return;
  NodeRecord& mine = record(node);
  const bool born = !mine.exists();
  if (born) {
    born_.push_back(node);
    mine.serial = now.serial;
    mine.label = label_of(now.path, now.depth());
    mine.path = now.path;
    mine.salt = now.salt;
    node_by_digest_[digest_key(mine.label.digest, mine.label.size, now.salt)] = node;
  }
  if (!born && now.edge_size() < mine.edge_size) cut_.push_back(node);
  mine.edge_size = now.edge_size();
  if (const HostTier* const host = policy_.host(); host != nullptr)
    mine.has_host_state = host->nodes[node.value].state.exists();
  if (policy_.windows() != nullptr)
    mine.has_window =
        policy_.tree().has_window(node) ||
        (policy_.host() != nullptr && !policy_.host()->nodes[node.value].window.empty());
  if (born || touched.kv) {
    mine.kv = now.kv;
    if (!touched.kept_kv) {
      own_kv(mine.kv, kOfNode | node.value);
      check_kv_labels(node);
    }
  }
  if (mine.state != now.state) {
    mine.state = now.state;
    own_state(now.state, kOfNode | node.value);
    check_state_label(node);
  }
}

/// New parents take over the locks below them: a lock counts at every node above it.
void RadixAuditor::reparent() {
  for (const Touched& touched : touched_) {
    NodeRecord& mine = record(touched.node);
    if (!mine.exists() || mine.parent == actual(touched.node).parent) continue;
    if (mine.parent.exists() && mine.parent != kRoot && record(mine.parent).exists())
      --record(mine.parent).child_count;
    mine.parent = actual(touched.node).parent;
    if (mine.parent.exists() && mine.parent != kRoot) ++record(mine.parent).child_count;
  }
  if (born_.empty()) return;
  const auto is_born = [&](NodeIndex node) {
    return std::ranges::find(born_, node) != born_.end();
  };
  const auto pass_up = [&](NodeIndex node) {
    if (is_born(record(node).parent))
      record(record(node).parent).full_locks += record(node).full_locks;
  };
  for (const Touched& touched : touched_)
    if (record(touched.node).exists() && !is_born(touched.node)) pass_up(touched.node);
  // The deepest first: a new node has its sum before it passes it on.
  std::ranges::sort(
      born_, [&](NodeIndex a, NodeIndex b) { return record(a).label.size > record(b).label.size; });
  for (const NodeIndex node : born_) pass_up(node);
}

/// Older rules do not count a lock on a tombstone.
bool RadixAuditor::locks_state(NodeIndex end) const {
  return has_states_ && (rules_.counts_bare_locks || actual(end).state.exists());
}

void RadixAuditor::count_locks(NodeIndex end, bool with_state, int by) {
  if (!end.exists() || end == kRoot || !record(end).exists()) return;
  touch(end);
  if (with_state && locks_state(end)) record(end).state_locks += static_cast<std::uint32_t>(by);
  for (NodeIndex at = end; at.exists() && at != kRoot && record(at).exists();
       at = record(at).parent) {
    touch(at);
    record(at).full_locks += static_cast<std::uint32_t>(by);
  }
}

/// A lazy request that stores a tracked state and finds no slot free gives up its lock on the state
/// that it started from, before anything is evicted. So does one that decodes beyond the window of
/// its prefix.
NodeIndex RadixAuditor::given_up_state(const Operation& operation) const {
  if (operation.verb == Verb::extend && policy_.windows() != nullptr && has_states_)
    for (const RadixRequest& now : policy_.requests())
      for (const RequestRecord& before : requests_)
        if (now.id == operation.id && before.id == operation.id && now.window.is_released &&
            before.state_locked)
          return before.locked;
  if (operation.verb != Verb::checkpoint || !policy_.options().lazy ||
      owned_states_ != policy_.state_pool().slot_count())
    return NodeIndex::none();
  const auto mine = std::ranges::find(requests_, operation.id, &RequestRecord::id);
  if (mine == requests_.end() || !mine->state_locked || mine->locked == kRoot)
    return NodeIndex::none();
  const std::uint32_t tracked = mine->tracking.last_size;
  const std::int64_t up_to =
      operation.up_to == Operation::kAbsent ? mine->computed : operation.up_to;
  return tracked != 0 && tracked <= up_to ? mine->locked : NodeIndex::none();
}

void RadixAuditor::follow_request(const Operation& operation) {
  const auto mine = std::ranges::find(requests_, operation.id, &RequestRecord::id);
  if (mine == requests_.end()) return;
  const auto place = static_cast<std::uint32_t>(mine - requests_.begin());
  if (given_up_.exists() && stamp_[given_up_.value] == operation_) mine->state_locked = false;
  disown_state(mine->live, kOfRequest | place);
  for (const StateSlot slot : mine->tracking.slots) disown_state(slot, kOfRequest | place);
  disown_kv(mine->own_kv, kOfRequest | place);
  mine->live = StateSlot::none();
  mine->own_kv.clear();
}

/// The operation's request as it is now: its locks, its slots, I4 (its row is its path) and that
/// its state fits its KV.
void RadixAuditor::check_request(const Operation& operation) {
  const auto& running = policy_.requests();
  const auto now = std::ranges::find(running, operation.id, &RadixRequest::id);
  auto mine = std::ranges::find(requests_, operation.id, &RequestRecord::id);
  if (now == running.end()) {
    if (mine == requests_.end()) return;
    count_locks(mine->locked, mine->state_locked, -1);
    mine->locked = NodeIndex::none();
    last_gone_ = *mine;
    owned_before_ = mine->owned;
    mine->id = Name();
    return;
  }
  if (mine == requests_.end()) {
    mine = std::ranges::find_if(requests_, [](const RequestRecord& r) { return !r.id.exists(); });
    if (mine == requests_.end()) mine = requests_.emplace(requests_.end());
    mine->id = operation.id;
    mine->salt = operation.salt;
    mine->locked = NodeIndex::none();
    mine->computed = mine->written = now->computed;
    mine->tracking = {};
  }
  const auto place = static_cast<std::uint32_t>(mine - requests_.begin());
  check_tracked(operation, *mine, *now);
  owned_before_ = mine->owned;
  mine->written = written_by(operation, *mine, *now);
  mine->known = now->known;
  mine->prompt_size = now->prompt_size;
  mine->computed = now->computed;
  mine->owned = now->owned;
  if (mine->locked != now->locked || mine->state_locked != now->state_locked) {
    count_locks(mine->locked, mine->state_locked, -1);
    count_locks(now->locked, now->state_locked, +1);
    mine->locked = now->locked;
    mine->state_locked = now->state_locked;
  }
  mine->live = now->live;
  own_state(mine->live, kOfRequest | place);
  mine->tracking = now->tracking;
  for (const StateSlot slot : mine->tracking.slots) own_state(slot, kOfRequest | place);
  mine->own_kv.clear();
  cut(now->kv, now->owned, now->allocated, mine->own_kv);
  own_kv(mine->own_kv, kOfRequest | place);

  scratch_.clear();
  KvRuns row;
  cut(now->kv, 0, now->owned, row);
  path_kv(now->locked, scratch_);
  if (!same_slots(row, scratch_))
    report(FindingKind::kv_state_disagree,
           fmt::format("the row of request `{}` is not the tree's KV on its path",
                       operation.id.text()),
           "the slots of the path", "others");
  check_live_state(operation, *now, mine->written);
}

/// The KV of a node and of all above it, in token order, by the records.
void RadixAuditor::path_kv(NodeIndex end, KvRuns& onto) const {
  std::vector<NodeIndex> path;
  for (NodeIndex at = end; at.exists() && at != kRoot; at = nodes_[at.value].parent)
    path.push_back(at);
  for (; !path.empty(); path.pop_back())
    onto.insert(onto.end(), nodes_[path.back().value].kv.begin(),
                nodes_[path.back().value].kv.end());
}

/// The tokens that the running state has seen. With a ring a decode step leaves it as it is, but
/// for every L-th one and those that end on the track interval; chunks and verifications write it.
std::uint32_t RadixAuditor::written_by(const Operation& operation, const RequestRecord& before,
                                       const RadixRequest& now) const {
  const SglangOptions& options = policy_.options();
  const bool decodes =
      operation.verb == Verb::extend && operation.drafts.empty() && before.computed >= now.admitted;
  if (options.ring == 0 || now.verifying || (!decodes && now.computed != before.computed))
    return now.computed;
  std::uint32_t written = before.written;
  for (std::uint32_t size = before.computed + 1; size <= now.computed; ++size)
    if (size - written == options.ring || size % options.track_interval == 0) written = size;
  return written;
}

void RadixAuditor::check_live_state(const Operation& operation, const RadixRequest& now,
                                    std::uint32_t written) {
  if (labels_ == nullptr || !has_states_ || !labels_->state_exists(now.live)) return;
  // A load brings it, or another server.
  if (now.source.exists() || now.arrives || labels_->state_awaited(now.live)) return;
  for (const StatePart part : kStateParts) {
    const Label due = label_of(now.known, part == StatePart::conv ? now.computed : written);
    const Label& label = labels_->label(now.live, part);
    if (label == due) continue;
    const FindingKind kind = operation.verb != Verb::admit ? FindingKind::kv_state_disagree
                             : now.computed == 0           ? FindingKind::dirty_slot
                                                           : FindingKind::wrong_state_prefix;
    report(kind,
           fmt::format("request `{}` has the KV of {} and a {} state that stands for {}",
                       operation.id.text(), counted(now.computed, "token"), to_string(part),
                       label.text()),
           due.text(), label.text());
    break;
  }
}

/// A tracked state stands for as many tokens as the request says, and was taken where the forward
/// has one: a chunk's kernel after the last token, or a whole number of its own chunks after the
/// first; decoding and verification after each token.
void RadixAuditor::check_tracked(const Operation& operation, const RequestRecord& before,
                                 const RadixRequest& now) {
  const Tracking& tracking = now.tracking;
  const std::uint32_t sizes[] = {tracking.last_size, tracking.previous_size};
  for (std::uint32_t i = 0; i < 2; ++i) {
    const std::uint32_t size = sizes[i];
    const StateSlot slot = tracking.slots[i == 0 ? tracking.last : tracking.previous];
    if (size == 0 || labels_ == nullptr || !labels_->state_exists(slot)) continue;
    const Label due = label_of(now.known, size);
    for (const StatePart part : kStateParts) {
      const Label& label = labels_->label(slot, part);
      if (label == due) continue;
      report(FindingKind::wrong_state_prefix,
             fmt::format("the {} state in tracking slot {} of request `{}` stands for {}",
                         to_string(part), slot.value, now.id.text(), label.text()),
             due.text(), label.text());
      break;
    }
  }
  for (const Tracking::Launched& launched : tracking.launched) {
    const StateSlot slot = tracking.slots[launched.slot];
    if (labels_ == nullptr || !labels_->state_exists(slot)) continue;
    const Label due = label_of(now.known, launched.size);
    if (labels_->recurrent(slot) != due || labels_->conv(slot) != due)
      report(FindingKind::wrong_state_prefix,
             fmt::format("the slot {} that request `{}` has under way stands for {}", slot.value,
                         now.id.text(), labels_->recurrent(slot).text()),
             due.text(), labels_->recurrent(slot).text());
  }
  const std::uint32_t size = tracking.last_size;
  const auto chunk = static_cast<std::uint32_t>(policy_.config().model_chunk);
  const bool is_chunk = operation.verb == Verb::extend && before.computed < now.admitted;
  if (!is_chunk || size <= before.computed || size == now.computed ||
      (size - before.computed) % chunk == 0)
    return;
  report(
      FindingKind::unaligned_state,
      fmt::format(
          "request `{}` kept a state after {} of a chunk from {} to {}, where the kernel has none",
          now.id.text(), counted(size, "token"), before.computed, now.computed),
      fmt::format("a multiple of {} from {}", counted(chunk, "token"), before.computed),
      fmt::format("{} from it", counted(size - before.computed, "token")));
}

void RadixAuditor::follow_held() {
  const auto& slots = policy_.held_slots();
  if (!slots.empty() || !held_slots_.empty()) held_slots_ = slots;
  for (std::size_t i = 0; i < held_slots_.size(); ++i)
    own_state(held_slots_[i].slot, kOfHeld | static_cast<std::uint32_t>(i));
  for (HeldLock& mine : held_locks_) {
    const auto now = std::ranges::find(policy_.held_locks(), mine.name, &HeldLock::name);
    if (now == policy_.held_locks().end()) count_locks(mine.node, true, -1);
  }
  for (const HeldLock& held : policy_.held_locks()) {
    const auto mine = std::ranges::find(held_locks_, held.name, &HeldLock::name);
    if (mine == held_locks_.end()) count_locks(held.node, true, +1);
  }
  if (!held_locks_.empty() || !policy_.held_locks().empty()) held_locks_ = policy_.held_locks();
}

// --- Checks --------------------------------------------------------------------------------------

void RadixAuditor::account(const NodeRecord& node, int by) {
  (node.full_locks != 0 ? sizes_.protected_kv : sizes_.evictable_kv) +=
      by * std::int64_t{node.device_size()};
  if (node.state.exists())
    (node.state_locks != 0 ? sizes_.protected_states : sizes_.evictable_states) += by;
}

void RadixAuditor::check_node(NodeIndex node) {
  const NodeRecord& mine = record(node);
  if (!mine.exists()) return;
  account(mine, +1);
  const RadixNode& now = actual(node);
  const std::uint32_t page = policy_.tree().options().page;
  if (mine.edge_size == 0 || mine.edge_size % page != 0)
    report(FindingKind::size_accounting,
           fmt::format("{} has an edge of {}", name_of(node), counted(mine.edge_size, "token")),
           "at least one whole page", std::to_string(mine.edge_size));
  const Label parent = now.parent == kRoot ? Label{} : record(now.parent).label;
  if (parent.size != now.start || now.path.digest(now.start) != parent.digest)
    report(FindingKind::wrong_state_prefix,
           fmt::format("{} does not continue its parent", name_of(node)), parent.text(),
           label_of(now.path, now.start).text());
  if (now.full_lock != mine.full_locks || now.state_lock != mine.state_locks)
    report(
        FindingKind::lock_imbalance,
        fmt::format("{} counts {} KV and {}, and {} and {} are held", name_of(node), now.full_lock,
                    counted(now.state_lock, "state lock"), mine.full_locks, mine.state_locks),
        fmt::format("{} and {}", mine.full_locks, mine.state_locks),
        fmt::format("{} and {}", now.full_lock, now.state_lock));
  if (has_states_) check_list_place(node);
  if (rules_.drops_bare_parents && mine.child_count == 0 && !now.state.exists() &&
      mine.full_locks == 0)
    report(FindingKind::tombstone_rule,
           fmt::format("{} is an unlocked leaf without a state", name_of(node)),
           "it goes with its last child", "it stays");
}

/// Above a state that was just stored, states beyond the cap must be locked or at a fork. A fork is
/// also what lost a child to the copies that the same operation began.
void RadixAuditor::check_path_cap(NodeIndex tail) {
  const std::int64_t cap = policy_.options().path_cap;
  if (cap < 0 || !tail.exists()) return;
  std::int64_t states = 0;
  NodeIndex spare = NodeIndex::none();
  for (NodeIndex at = tail; at.exists() && at != kRoot; at = record(at).parent) {
    if (!record(at).state.exists()) continue;
    ++states;
    const bool was_fork = std::ranges::find(bereft_, at) != bereft_.end();
    if (at != tail && record(at).state_locks == 0 && record(at).child_count == 1 && !was_fork)
      spare = at;
  }
  if (states > cap && spare.exists())
    report(FindingKind::tombstone_rule,
           fmt::format("the path to {} has {}, and {} could go", name_of(tail),
                       counted(states, "state"), name_of(spare)),
           fmt::format("at most {}", cap), std::to_string(states));
}

void RadixAuditor::check_kv_labels(NodeIndex node) {
  const RadixNode& now = actual(node);
  if (policy_.host() != nullptr && now.kv.empty()) return;
  std::uint32_t depth = now.start;
  for (const KvRun& run : now.kv) {
    depth += run.size;
    if (depth > now.depth()) break;
    const std::uint32_t last = run.slots().back();
    if (labels_ == nullptr || !labels_->kv_exists(last) || labels_->kv_awaited(last)) continue;
    if (labels_->kv_fingerprint(last) != now.path.fingerprint(depth))
      report(
          FindingKind::wrong_state_prefix,
          fmt::format("KV slot {} of {} is not that of token {}", last, name_of(node), depth - 1),
          label_of(now.path, depth).text(), "another prefix");
  }
  if (depth != now.depth())
    report(FindingKind::kv_state_disagree,
           fmt::format("{} has {} for {}", name_of(node), counted(depth - now.start, "KV slot"),
                       counted(now.edge_size(), "token")),
           std::to_string(now.edge_size()), std::to_string(depth - now.start));
}

/// I3: a state in the tree stands for exactly the path above it.
void RadixAuditor::check_state_label(NodeIndex node) {
  const RadixNode& now = actual(node);
  // A slot that is free was reported as such by own_state().
  if (labels_ == nullptr || !labels_->state_exists(now.state) ||
      !labels_->state_in_use(now.state) || labels_->state_awaited(now.state))
    return;
  const Label due = label_of(now.path, now.depth());
  for (const StatePart part : kStateParts) {
    const Label& label = labels_->label(now.state, part);
    if (label == due) continue;
    report(FindingKind::wrong_state_prefix,
           fmt::format("the {} state in slot {} of {} stands for {}", to_string(part),
                       now.state.value, name_of(node), label.text()),
           due.text(), label.text());
    return;
  }
}

void RadixAuditor::check_list_place(NodeIndex node) {
  const RadixNode& now = actual(node);
  const RadixTree& tree = policy_.tree();
  const bool listed = now.lru_newer.exists() || now.lru_older.exists() || tree.lru_newest() == node;
  if (listed != now.state.exists()) {
    report(FindingKind::lru_order,
           fmt::format("{} has {} and is {}in the list of states", name_of(node),
                       slot_text(now.state), listed ? "" : "not "),
           "in the list exactly with a state", listed ? "in the list" : "not in it");
    return;
  }
  if (!listed) return;
  const auto later = [&](NodeIndex newer, NodeIndex older) {
    if (!newer.exists() || !older.exists() || record(newer).last_use > record(older).last_use)
      return;
    report(FindingKind::lru_order,
           fmt::format("in the list of states {} is newer than {}, which was used after it",
                       name_of(newer), name_of(older)),
           "the order of use", "another");
  };
  later(now.lru_newer, node);
  later(node, now.lru_older);
}

void RadixAuditor::check_totals() {
  const RadixTree::Sizes& now = policy_.tree().sizes();
  const auto compare = [&](const char* what, std::int64_t due, std::int64_t is) {
    if (due != is)
      report(FindingKind::size_accounting,
             fmt::format("the tree counts {} {}, and there are {}", is, what, due),
             std::to_string(due), std::to_string(is));
  };
  compare("evictable KV tokens", sizes_.evictable_kv, now.evictable_kv);
  compare("protected KV tokens", sizes_.protected_kv, now.protected_kv);
  compare("evictable states", sizes_.evictable_states, now.evictable_states);
  compare("protected states", sizes_.protected_states, now.protected_states);
  if (owned_kv_ + policy_.kv_pool().free_count() != policy_.kv_pool().slot_count()) {
    ZeroedArray<char> is_free(kv_owner_.size());
    for (const KvRun& run : policy_.kv_pool().free_runs())
      for (const std::uint32_t slot : run.slots()) is_free[slot] = 1;
    find_unconserved("KV", kv_owner_, policy_.kv_pool().first_slot(), owned_kv_,
                     policy_.kv_pool().free_count(), [&](std::uint32_t slot) {
                       return is_free[slot] != 0 || slot >= policy_.kv_pool().first_unused();
                     });
  }
  const auto& free_states = policy_.state_pool().free_slots();
  const auto held =  // by a request that was passed over; its law is that of the copy
      std::ranges::count_if(policy_.waiting(),
                            [](const auto& entry) { return entry.second.slot.exists(); });
  if (owned_states_ + held + policy_.state_pool().free_count() != policy_.state_pool().slot_count())
    find_unconserved("state", state_owner_, policy_.state_pool().first_slot(), owned_states_,
                     policy_.state_pool().free_count(), [&](std::uint32_t slot) {
                       return slot >= policy_.state_pool().first_unused() ||
                              std::ranges::find(free_states, StateSlot{slot}) != free_states.end();
                     });
}

/// Called where owned and free slots do not add up to the pool: names a slot that is both or
/// neither.
template <class IsFree>
void RadixAuditor::find_unconserved(const char* what, const ZeroedArray<Owner>& owners,
                                    std::uint32_t first, std::int64_t owned, std::int64_t free,
                                    IsFree is_free) {
  const auto all = static_cast<std::int64_t>(owners.size() - first);
  const std::string due = fmt::format("{}, each free or owned", counted(all, "slot"));
  const std::string now = fmt::format("{} free, {} owned", free, owned);
  for (std::uint32_t slot = first; slot < owners.size(); ++slot) {
    const bool is_owned = owners[slot] != 0;
    if (is_owned && is_free(slot))
      return report(
          FindingKind::freed_slot_in_use,
          fmt::format("{} slot {} is free and belongs to {}", what, slot, owner_name(owners[slot])),
          due, now);
    if (!is_owned && !is_free(slot))
      return report(FindingKind::leak,
                    fmt::format("{} slot {} is neither free nor anybody's", what, slot), due, now);
  }
  report(FindingKind::size_accounting,
         fmt::format("the pool counts {}, and there should be {}",
                     counted(free, fmt::format("free {} slot", what)), all - owned),
         due, now);
}

namespace {

const Registration<AuditorEntry> kRadixAuditor{
    {.name = "radix",
     .make = [](Subject& subject, const LabelState* labels) -> std::unique_ptr<Auditor> {
       auto* const policy = dynamic_cast<SglangPolicy*>(&subject);
       return policy == nullptr ? nullptr : std::make_unique<RadixAuditor>(*policy, labels);
     }}};

}  // namespace

}  // namespace lockstep::cache_sim
