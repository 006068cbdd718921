#include "cache_sim/model/label_state.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "reference/base/counted.hpp"
#include "reference/base/require.hpp"

namespace lockstep {

std::string_view to_string(StatePart part) {
  return part == StatePart::recurrent ? "recurrent" : "conv";
}

namespace {

/// The size in the label of a state that a copy in flight writes.
constexpr std::uint32_t kAwaitedSize = std::numeric_limits<std::uint32_t>::max();

}  // namespace

std::string Label::text() const {
  if (poisoned) return size == kAwaitedSize ? "what a copy has not brought yet" : "a freed state";
  if (size == 0 && digest == 0) return "the empty prefix";
  return fmt::format("a prefix of {} ({:08x})", counted(size, "token"), digest >> 29);
}

namespace {

/// The last slot whose elements all have an index below 2^31.
std::uint32_t last_narrow(std::int64_t stride) {
  constexpr std::int64_t kElements = std::int64_t{1} << 31;
  if (stride == 0) return std::numeric_limits<std::uint32_t>::max();
  return static_cast<std::uint32_t>(kElements / stride - 1);
}

}  // namespace

LabelState::LabelState(std::int64_t states, std::int64_t kv_end, Strides strides)
    : states_(static_cast<std::size_t>(states + 1)),
      kv_fingerprint_(static_cast<std::size_t>(kv_end)),
      kv_use_(static_cast<std::size_t>(kv_end)),
      strides_(strides),
      last_narrow_kv_(last_narrow(strides.kv)),
      last_narrow_state_(last_narrow(strides.state)) {}

void LabelState::report_offset(const char* what, std::uint32_t slot, std::int64_t stride) {
  report(FindingKind::out_of_range,
         fmt::format("{} slot {} holds the elements {} to {} of its layer: an offset of 32 bits "
                     "does not reach them",
                     what, slot, slot * stride, (slot + std::int64_t{1}) * stride - 1),
         "elements below 2147483648", std::to_string((slot + std::int64_t{1}) * stride - 1));
}

void LabelState::report(FindingKind kind, std::string text, std::string expected,
                        std::string actual) {
  findings_.push_back({kind, std::move(text), std::move(expected), std::move(actual)});
}

Findings LabelState::drain() {
  return std::exchange(findings_, {});
}

/// Whether a slot that is not simply in use may be used so.
bool LabelState::usable_in_copy(StateSlot slot, Access access, const char* what) {
  if (!state_exists(slot)) {
    report(
        FindingKind::out_of_range,
        fmt::format("state slot {} was {}, and the pool has slots 1 to {}",
                    slot.exists() ? std::to_string(slot.value) : "none", what, states_.size() - 1),
        fmt::format("a slot from 1 to {}", states_.size() - 1),
        slot.exists() ? std::to_string(slot.value) : "none");
    return false;
  }
  const Use use = states_[slot.value].use;
  if (use == 0) {
    report(FindingKind::freed_slot_in_use,
           fmt::format("state slot {} was {} although it is free", slot.value, what),
           "a slot in use", fmt::format("slot {} is free", slot.value));
    return false;
  }
  const bool is_read_by_others = (use & kAwaited) == 0 && access == Access::read;
  if (!is_read_by_others) report_copy(fmt::format("state slot {}", slot.value), use, access, what);
  return is_read_by_others;
}

/// A slot of a copy in flight was used.
void LabelState::report_copy(const std::string& slot, Use use, Access access, const char* what) {
  const bool is_target = (use & kAwaited) != 0;
  report(is_target && access != Access::write ? FindingKind::read_before_landed
                                              : FindingKind::source_changed,
         fmt::format("{} was {} while a copy in flight {} it", slot, what,
                     is_target ? "writes" : "reads"),
         "the copy lands first", "it has not landed");
}

void LabelState::allocate_state(StateSlot slot) {
  if (!state_exists(slot)) return void(usable(slot, Access::write, "allocated"));
  if (slot.value > last_narrow_state_) report_offset("state", slot.value, strides_.state);
  StateCell& cell = states_[slot.value];
  if (cell.use != 0)
    report(FindingKind::slot_in_two_places,
           fmt::format("state slot {} was handed out although it is in use", slot.value),
           "a free slot", fmt::format("slot {} is in use", slot.value));
  cell.use = kInUse;
  if (!cell.was_used)
    for (Label& label : cell.labels) label.poisoned = true;
  cell.was_used = true;
}

void LabelState::zero_state(StateSlot slot, StatePart part) {
  if (usable(slot, Access::write, "zeroed")) label_at(slot, part) = Label{};
}

void LabelState::copy_state(StateSlot source, StateSlot target, StatePart part) {
  if (usable(source, Access::read, "copied from") && usable(target, Access::write, "copied to"))
    label_at(target, part) = label_at(source, part);
}

/// Whether this part of the slot stands for `before`. Where it does not, a finding says that the
/// layer runs over tokens [before.size, end) from a wrong state.
bool LabelState::stands_for(StateSlot slot, StatePart part, const Label& before,
                            const Tokens& tokens, std::uint32_t end) {
  const Label& label = label_at(slot, part);
  const std::uint32_t begin = before.size;
  if (label == before) return true;
  report(begin == 0 ? FindingKind::dirty_slot : FindingKind::wrong_state_prefix,
         fmt::format("the {} state of slot {} runs over tokens {} to {} of {} but stands for {}",
                     to_string(part), slot.value, begin, end, tokens.text(60), label.text()),
         before.text(), label.text());
  return false;
}

/// Advances the label over tokens [before.size, end); false, with a finding, where it stood for
/// another prefix.
bool LabelState::advance(StateSlot slot, StatePart part, const Label& before, const Tokens& tokens,
                         std::uint32_t end) {
  if (!stands_for(slot, part, before, tokens, end)) return false;
  label_at(slot, part) = {extend_digest(before.digest, tokens, before.size, end), end};
  return true;
}

void LabelState::advance_state(StateSlot slot, StatePart part, const Tokens& tokens,
                               std::uint32_t begin, std::uint32_t end) {
  if (usable(slot, Access::both, "advanced"))
    advance(slot, part, label_of(tokens, begin), tokens, end);
}

// Overrides for both parts of a slot: a mistake about the slot itself is reported once, not by
// part.

void LabelState::zero_state(StateSlot slot) {
  if (usable(slot, Access::write, "zeroed")) states_[slot.value].labels = {};
}

void LabelState::copy_state(StateSlot source, StateSlot target) {
  if (usable(source, Access::read, "copied from") && usable(target, Access::write, "copied to"))
    states_[target.value].labels = states_[source.value].labels;
}

void LabelState::advance_state(StateSlot slot, const Tokens& tokens, std::uint32_t begin,
                               std::uint32_t end) {
  if (!usable(slot, Access::both, "advanced")) return;
  const Label before = label_of(tokens, begin);
  for (const StatePart part : kStateParts)
    if (!advance(slot, part, before, tokens, end)) return;
}

void LabelState::free_state(StateSlot slot) {
  if (!state_exists(slot)) return void(usable(slot, Access::write, "freed"));
  StateCell& cell = states_[slot.value];
  if (cell.use == 0)
    report(FindingKind::double_free,
           fmt::format("state slot {} was freed although it is free", slot.value), "a slot in use",
           fmt::format("slot {} is free", slot.value));
  else if (cell.use != kInUse)
    report_copy(fmt::format("state slot {}", slot.value), cell.use, Access::write, "freed");
  cell.use = 0;
  for (Label& label : cell.labels) label.poisoned = true;
  if (!verified_.empty()) verified_.erase(slot.value);
  if (!rings_.empty()) rings_.erase(slot.value);
}

void LabelState::verify_state(StateSlot slot, StatePart part, const VerifiedRow& row) {
  if (!usable(slot, Access::read, "verified from")) return;
  std::vector<Label>& left = verified_[slot.value][static_cast<std::size_t>(part)];
  left.clear();
  const Label before = label_of(row.known, row.begin);
  if (!stands_for(slot, part, before, row.known, row.known.size())) return;
  for (std::uint32_t size = row.begin + 1; size <= row.known.size(); ++size)
    left.push_back(label_of(row.known, size));
  for (std::uint32_t draft = 1; draft <= row.drafts.size(); ++draft) {
    const std::uint32_t place = row.inputs() + row.parent_of(draft);
    const Label parent = place == 0 ? before : left[place - 1];
    left.push_back({extend_digest(parent.digest, row.drafts[draft - 1]), parent.size + 1});
  }
}

void LabelState::commit_state(StateSlot verified, std::uint32_t at, StateSlot target,
                              StatePart part) {
  if (!usable(verified, Access::read, "committed from") ||
      !usable(target, Access::write, "committed to"))
    return;
  const std::vector<Label>& left = verified_[verified.value][static_cast<std::size_t>(part)];
  if (at < left.size()) {
    label_at(target, part) = left[at];
    return;
  }
  report(FindingKind::out_of_range,
         fmt::format("the verification of state slot {} has left {}, and number {} is committed",
                     verified.value, counted(left.size(), fmt::format("{} state", to_string(part))),
                     at),
         fmt::format("a number below {}", left.size()), std::to_string(at));
}

std::optional<LabelState::WrongRing> LabelState::wrong_ring(StateSlot slot, StateSlot ring,
                                                            std::uint32_t live,
                                                            const Tokens& tokens,
                                                            std::uint32_t size) const {
  const std::uint32_t written = size - std::min(live, size);
  const Label due = label_of(tokens, written);
  if (recurrent(slot) != due || live > size)
    return WrongRing{fmt::format("the recurrent state of slot {}", slot.value), due.text(),
                     recurrent(slot).text()};
  const auto found = rings_.find(ring.value);
  for (std::uint32_t i = 0; i < live; ++i) {
    const Label entry = label_of(tokens, written + i + 1);
    const bool is_there = found != rings_.end() && i < found->second.entries.size();
    if (is_there && found->second.entries[i] == entry) continue;
    return WrongRing{fmt::format("entry {} of the ring of slot {}", i, ring.value), entry.text(),
                     is_there ? found->second.entries[i].text() : "nothing: it was never written"};
  }
  return std::nullopt;
}

void LabelState::step_ring(StateSlot slot, const RingStep& step, const Tokens& tokens,
                           std::uint32_t begin) {
  if (!usable(slot, Access::read, "read") || !usable(step.slot, Access::read, "read for its ring"))
    return;
  const auto wrong = wrong_ring(slot, step.slot, step.live, tokens, begin);
  if (wrong) {
    report(FindingKind::wrong_state_prefix,
           fmt::format("a decode step after {} of {} reads state slot {} with {} of a ring, and {} "
                       "stands for {}",
                       counted(begin, "token"), tokens.text(60), slot.value,
                       counted(step.live, "entry", "entries"), wrong->what, wrong->actual),
           wrong->expected, wrong->actual);
    return;
  }
  const Label after = label_of(tokens, begin + 1);
  Ring& ring = rings_[step.slot.value];
  if (step.writes_state) label_at(slot, StatePart::recurrent) = after;
  if (!step.entry) return;
  if (*step.entry == 0) ring.conv_before = conv(slot);
  if (ring.entries.size() <= *step.entry) ring.entries.resize(*step.entry + std::size_t{1});
  ring.entries[*step.entry] = after;
}

void LabelState::fold_ring(StateSlot slot, std::uint32_t live, const Tokens& tokens,
                           std::uint32_t size) {
  if (!usable(slot, Access::write, "written")) return;
  if (const auto wrong = wrong_ring(slot, slot, live, tokens, size))
    return report(FindingKind::wrong_state_prefix,
                  fmt::format("{} of the ring of slot {} {} folded into its state after {} of {}, "
                              "and {} stands for {}",
                              counted(live, "entry", "entries"), slot.value, is_or_are(live),
                              counted(size, "token"), tokens.text(60), wrong->what, wrong->actual),
                  wrong->expected, wrong->actual);
  label_at(slot, StatePart::recurrent) = label_of(tokens, size);
}

void LabelState::rewind_conv(StateSlot slot) {
  if (usable(slot, Access::write, "written"))
    label_at(slot, StatePart::conv) = rings_[slot.value].conv_before;
}

void LabelState::receive_state(StateSlot slot, StatePart part, const Tokens& tokens,
                               std::uint32_t size) {
  if (usable(slot, Access::write, "received")) label_at(slot, part) = label_of(tokens, size);
}

void LabelState::run_padding_row(StateSlot slot) {
  if (slot.value == 0) return;
  if (!state_exists(slot)) return void(usable(slot, Access::both, "run over by a row of padding"));
  StateCell& cell = states_[slot.value];
  if (cell.use != 0)
    report(FindingKind::padding_leak,
           fmt::format("a row of padding runs over state slot {}, which is in use", slot.value),
           "the padding slot 0", fmt::format("slot {}", slot.value));
  for (Label& label : cell.labels) label.poisoned = true;
}

void LabelState::allocate_kv(KvSlots slots) {
  if (strides_.kv != 0)
    for (const std::uint32_t slot : slots)
      if (slot > last_narrow_kv_) {
        report_offset("KV", slot, strides_.kv);
        break;
      }
  Use* const use = &kv_use_[0];  // a store of a char might change the member
  for (const std::uint32_t slot : slots) {
    if (use[slot] != 0) [[unlikely]]
      report_kv(FindingKind::slot_in_two_places, slot, "handed out");
    use[slot] = kInUse;
  }
}

void LabelState::report_kv(FindingKind kind, std::uint32_t slot, const char* what) {
  const bool is_free = kv_use_[slot] == 0;
  if (!is_free && kind != FindingKind::slot_in_two_places)
    return report_copy(fmt::format("KV slot {}", slot), kv_use_[slot], Access::write, what);
  const char* const is = is_free ? "free" : "in use";
  report(kind, fmt::format("KV slot {} was {} although it is {}", slot, what, is),
         is_free ? "a slot in use" : "a free slot", fmt::format("slot {} is {}", slot, is));
}

void LabelState::write_kv(KvSlots slots, const Tokens& tokens, std::uint32_t begin) {
  fingerprints_.resize(slots.size());
  tokens.prefix_fingerprints(begin, begin + static_cast<std::uint32_t>(slots.size()),
                             fingerprints_);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (kv_use_[slots[i]] != kInUse) [[unlikely]]
      report_kv(FindingKind::freed_slot_in_use, slots[i], "written");
    kv_fingerprint_[slots[i]] = fingerprints_[i];
  }
  if (!index_keys_) return;
  for (std::size_t i = 0; i < slots.size(); ++i) (*index_keys_)[slots[i]] = fingerprints_[i];
}

void LabelState::read_kv(KvSlots slots, const Tokens& tokens, std::uint32_t begin) {
  for (std::uint32_t i = 0; i < slots.size(); ++i) {
    const std::uint32_t slot = slots[i];
    if (kv_use_[slot] == 0)
      return report(
          FindingKind::freed_slot_in_use,
          fmt::format("the KV of token {} of {} was read from slot {} although it is {}", begin + i,
                      tokens.text(60), slot, slot == 0 ? "the slot of padding" : "free"),
          "a slot in use", slot == 0 ? "no slot" : fmt::format("slot {} is free", slot));
    if (kv_awaited(slot))
      return report_copy(fmt::format("KV slot {}", slot), kv_use_[slot], Access::read, "read");
    if (kv_fingerprint_[slot] == tokens.fingerprint(begin + i + 1)) continue;
    return report(
        FindingKind::wrong_state_prefix,
        fmt::format("KV slot {} was read for token {} of {}, and stands for another prefix", slot,
                    begin + i, tokens.text(60)),
        label_of(tokens, begin + i + 1).text(), "another prefix");
  }
}

void LabelState::free_kv(KvSlots slots) {
  Use* const use = &kv_use_[0];
  for (const std::uint32_t slot : slots) {
    if (use[slot] != kInUse) [[unlikely]]
      return report_kv(FindingKind::double_free, slot, "freed");
    use[slot] = 0;
  }
}

void LabelState::copy_kv(KvSlots sources, KvSlots targets) {
  for (std::size_t i = 0; i < sources.size(); ++i) {
    for (const std::uint32_t slot : {sources[i], targets[i]})
      if (kv_use_[slot] == 0) return report_kv(FindingKind::freed_slot_in_use, slot, "copied");
    if (kv_use_[sources[i]] & kAwaited)
      return report_copy(fmt::format("KV slot {}", sources[i]), kAwaited, Access::read, "copied");
    kv_fingerprint_[targets[i]] = kv_fingerprint_[sources[i]];
    if (index_keys_) (*index_keys_)[targets[i]] = (*index_keys_)[sources[i]];
  }
}

// --- Copies between memories ---------------------------------------------------------------------

/// Whether the slot is a target that may be chosen. Of several copies that bring it, the first one
/// finds a slot in use, the others one that is awaited.
bool LabelState::begins_to_await(const TierCopy& copy, StateSlot target) {
  if (copy.slice != 0 && state_exists(target) && in_slices_.contains(target.value)) return false;
  return usable(target, Access::write, "chosen for a copy");
}

void LabelState::queue_copy(const TierCopy& copy) {
  ++flying_;
  for (const auto& [source, target] : copy.states) {
    if (!state_exists(source)) continue;
    const bool is_chosen = begins_to_await(copy, target);
    if (!is_chosen && (copy.slice == 0 || !state_exists(target))) continue;
    states_[source.value].use = static_cast<Use>(states_[source.value].use + kRead);
    if (!is_chosen) continue;
    states_[target.value].use |= kAwaited;
    states_[target.value].labels.fill({.digest = 0, .size = kAwaitedSize, .poisoned = true});
    if (copy.slices > 1)
      in_slices_[target.value] = {copy.slices,
                                  {},
                                  std::vector<Channel>(copy.channels),
                                  std::vector<std::uint32_t>(copy.channels)};
  }
  for (const KvRun& run : copy.kv_sources)
    for (const std::uint32_t slot : run.slots())
      kv_use_[slot] = static_cast<Use>(kv_use_[slot] + kRead);
  for (const KvRun& run : copy.kv_targets)
    for (const std::uint32_t slot : run.slots()) {
      if (copy.slice != 0 && kv_in_slices_.contains(slot)) continue;
      if (kv_use_[slot] != kInUse)
        report_kv(FindingKind::freed_slot_in_use, slot, "chosen for a copy");
      kv_use_[slot] |= kAwaited;
      kv_fingerprint_[slot] = 0;
      if (index_keys_) (*index_keys_)[slot] = 0;
      if (copy.slices > 1) kv_in_slices_[slot] = {copy.slices, {}};
    }
}

/// A slot that was freed meanwhile was reported then.
void LabelState::release_sources(const TierCopy& copy) {
  const auto leave = [](Use& use) {
    if (use >= kRead) use = static_cast<Use>(use - kRead);
  };
  for (const auto& [source, target] : copy.states)
    if (state_exists(source)) leave(states_[source.value].use);
  for (const KvRun& run : copy.kv_sources)
    for (const std::uint32_t slot : run.slots()) leave(kv_use_[slot]);
}

namespace {

/// Whether a tensor of keys or values goes to that of another layer, or of the other kind.
bool mixes_tensors(const TierCopy& copy) {
  return std::ranges::any_of(copy.kv_tensors,
                             [](const auto& pair) { return pair.source != pair.target; });
}

}  // namespace

void LabelState::land_copy(const TierCopy& copy) {
  --flying_;
  release_sources(copy);
  if (copy.slices > 1) {
    for (const auto& [source, target] : copy.states) {
      land_slice(copy, source, target);
      end_slice(target, copy.slices);
    }
    std::vector<std::uint32_t> sources;
    for (const KvRun& run : copy.kv_sources)
      sources.insert(sources.end(), run.slots().begin(), run.slots().end());
    std::size_t at = 0;
    for (const KvRun& run : copy.kv_targets)
      for (const std::uint32_t slot : run.slots()) {
        land_kv_slice(copy, sources[at++], slot);
        end_kv_slice(slot, copy.slices);
      }
    return;
  }
  for (const auto& [source, target] : copy.states)
    if (state_exists(target)) arrive(states_[target.value].use);
  for (const KvRun& run : copy.kv_targets)
    for (const std::uint32_t slot : run.slots()) arrive(kv_use_[slot]);
  LayerState::land_copy(copy);
  if (mixes_tensors(copy))
    for (const KvRun& run : copy.kv_targets)
      for (const std::uint32_t slot : run.slots()) kv_fingerprint_[slot] = 0;
  if (copy.index_keys || !index_keys_) return;
  for (const KvRun& run : copy.kv_targets)
    for (const std::uint32_t slot : run.slots()) (*index_keys_)[slot] = 0;
}

void LabelState::fail_copy(const TierCopy& copy) {
  --flying_;
  release_sources(copy);
  for (const auto& [source, target] : copy.states) {
    if (!state_exists(target)) continue;
    if (copy.slices > 1)
      end_slice(target, copy.slices);
    else
      arrive(states_[target.value].use);
  }
  for (const KvRun& run : copy.kv_targets)
    for (const std::uint32_t slot : run.slots()) {
      if (copy.slices > 1)
        end_kv_slice(slot, copy.slices);
      else
        arrive(kv_use_[slot]);
    }
}

void LabelState::abandon_copy(const TierCopy& copy) {
  release_sources(copy);
}

/// A slice of the recurrent state and some channels of the conv state, as the source is now.
void LabelState::land_slice(const TierCopy& copy, StateSlot source, StateSlot target) {
  const auto found = in_slices_.find(target.value);
  if (found == in_slices_.end() || !usable(source, Access::read, "copied from")) return;
  AwaitedState& awaited = found->second;
  awaited.recurrent.push_back(recurrent(source));
  for (const TierCopy::Channels& channels : copy.conv)
    for (std::uint32_t i = 0; i < channels.count; ++i) {
      if (channels.target + i >= awaited.conv.size()) continue;
      awaited.conv[channels.target + i] = {conv(source), channels.source + i};
      ++awaited.landed[channels.target + i];
    }
}

void LabelState::land_kv_slice(const TierCopy& copy, std::uint32_t source, std::uint32_t target) {
  const auto found = kv_in_slices_.find(target);
  if (found == kv_in_slices_.end()) return;
  if (kv_use_[source] == 0) return report_kv(FindingKind::freed_slot_in_use, source, "copied");
  if (kv_use_[source] & kAwaited)
    return report_copy(fmt::format("KV slot {}", source), kAwaited, Access::read, "copied");
  found->second.landed.push_back(mixes_tensors(copy) ? 0 : kv_fingerprint_[source]);
}

/// With the last slice the state is there. It stands for a prefix where all slices do, and each
/// channel is in its place.
void LabelState::end_slice(StateSlot target, std::uint32_t slices) {
  const auto found = in_slices_.find(target.value);
  if (found == in_slices_.end() || --found->second.left != 0) return;
  const AwaitedState awaited = std::move(found->second);
  in_slices_.erase(found);
  StateCell& cell = states_[target.value];
  arrive(cell.use);
  const std::vector<Label>& recurrent = awaited.recurrent;
  if (recurrent.size() == slices &&
      std::equal(recurrent.begin() + 1, recurrent.end(), recurrent.begin()))
    label_at(target, StatePart::recurrent) = recurrent.front();
  for (std::uint32_t i = 0; i < awaited.conv.size(); ++i)
    if (awaited.landed[i] != 1 || awaited.conv[i] != Channel{awaited.conv.front().label, i}) return;
  if (!awaited.conv.empty()) label_at(target, StatePart::conv) = awaited.conv.front().label;
}

void LabelState::end_kv_slice(std::uint32_t target, std::uint32_t slices) {
  const auto found = kv_in_slices_.find(target);
  if (found == kv_in_slices_.end() || --found->second.left != 0) return;
  const std::vector<std::uint64_t> landed = std::move(found->second.landed);
  kv_in_slices_.erase(found);
  arrive(kv_use_[target]);
  const bool is_one =
      landed.size() == slices && std::equal(landed.begin() + 1, landed.end(), landed.begin());
  kv_fingerprint_[target] = is_one ? landed.front() : 0;
  if (index_keys_) (*index_keys_)[target] = kv_fingerprint_[target];
}

/// A row reads the KV of all tokens before it.
void LabelState::forward(const ForwardRow& row) {
  if (flying_ != 0)
    for_slots(row.kv, 0, row.begin, [&](KvSlots slots, std::uint32_t) {
      for (const std::uint32_t slot : slots)
        if (kv_awaited(slot))
          return report_copy(fmt::format("KV slot {}", slot), kv_use_[slot], Access::read, "read");
    });
  if (index_keys_) check_index_keys(row);
  LayerState::forward(row);
}

/// A sparse attention chooses among all tokens before the row by their index keys.
void LabelState::check_index_keys(const ForwardRow& row) {
  bool is_told = false;
  for_slots(row.kv, 0, row.begin, [&](KvSlots slots, std::uint32_t place) {
    for (std::size_t i = 0; i < slots.size() && !is_told; ++i) {
      const std::uint32_t slot = slots[i];
      if (kv_awaited(slot) || (*index_keys_)[slot] == kv_fingerprint_[slot]) continue;
      is_told = true;
      report(FindingKind::wrong_state_prefix,
             fmt::format("the index key of KV slot {} is not that of token {} of {}", slot,
                         place + i, row.tokens.text(60)),
             "the index key of the prefix whose KV the slot holds",
             (*index_keys_)[slot] == 0 ? "none: no copy has brought it" : "another one");
    }
  });
}

LayerState::Lengths LabelState::state_lengths(StateSlot slot, std::int64_t expected) const {
  if (!state_exists(slot)) return {expected, expected};
  return {recurrent(slot).size, conv(slot).size};
}

}  // namespace lockstep
