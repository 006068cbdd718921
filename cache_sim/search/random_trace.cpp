#include "cache_sim/search/random_trace.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace lockstep::cache_sim {

Tokens RandomTrace::fresh_tokens(std::int64_t size) {
  return drawn_tokens(swarm_, draw_, size);
}

Tokens RandomTrace::some_tokens() {
  return drawn_prompt(swarm_, draw_, model_.seen());
}

Name RandomTrace::some_salt() {
  return draw_.chance(static_cast<std::uint64_t>(swarm_.salted), 40)
             ? Name::intern(draw_.chance(1, 2) ? "s" : "t")
             : Name();
}

Name RandomTrace::fresh_name(const char* prefix) {
  return Name::intern(fmt::format("{}{}", prefix, names_++));
}

Operation RandomTrace::admission() {
  Operation admit;
  admit.verb = Verb::admit;
  admit.id = fresh_name("r");
  admit.salt = some_salt();
  admit.tokens = some_tokens();
  if (swarm_.moves != 0 && admit.tokens.size() < 2)
    admit.tokens = admit.tokens.followed_by(fresh_tokens(1));
  const auto& captured = model_.captured();
  if (swarm_.slots != 0 && !captured.empty() && draw_.chance(1, 2)) {
    const LegalityModel::Captured& one = captured[draw_.below(captured.size())];
    admit.tokens = one.tokens.followed_by(fresh_tokens(draw_.between(1, 4)));
    admit.salt = one.salt;
  }
  if (draw_.below(3) == 0)
    admit.prompt = static_cast<std::int64_t>(draw_.below(admit.tokens.size() + 1));
  if (swarm_.rooms && draw_.chance(1, 3)) admit.room = draw_.between(0, swarm_.longest);
  if (swarm_.blocks && admit.prompt == 0) admit.prompt = 1;
  if (swarm_.sent > 0 && draw_.chance(static_cast<std::uint64_t>(swarm_.sent), 10))
    admit.external = draw_.between(0, admit.tokens.size());
  if (sometimes(swarm_.keyed)) draw_keys(admit);
  // Another request of the name leaves.
  if (swarm_.prefetches && refused_ && draw_.chance(1, 10)) admit.id = refused_->id;
  if (swarm_.has_disk) refused_ = admit;
  return admit;
}

/// Draws an adapter, and images some of which are equal. Equal ones have one length: a server names
/// an image by its content, which says how many tokens it has.
void RandomTrace::draw_keys(Operation& admit) {
  if (draw_.chance(1, 4)) admit.lora = Name::intern(draw_.chance(1, 2) ? "l" : "m");
  if (draw_.chance(1, 4)) return;
  const std::int64_t most = admit.prompt == Operation::kAbsent ? admit.tokens.size() : admit.prompt;
  std::int64_t at = draw_.between(0, 3);
  for (std::int64_t size; (size = draw_.between(1, 4)), at + size <= most;
       at += size + draw_.between(0, 5))
    admit.images.push_back(
        {static_cast<std::uint32_t>(at), static_cast<std::uint32_t>(size),
         Name::intern(fmt::format("{}{}", draw_.chance(2, 3) ? "i" : "j", size))});
}

/// The accept that ends a verification.
Operation RandomTrace::verdict(const LegalityModel::Request& request) {
  Operation operation;
  operation.id = request.id;
  operation.verb = draw_.chance(1, 9) ? Verb::abort : Verb::accept;
  if (operation.verb == Verb::abort) return operation;
  const Tokens kept = request.parents.empty() ? request.drafts.prefix(static_cast<std::uint32_t>(
                                                    draw_.below(request.drafts.size() + 1)))
                                              : some_way(request);
  operation.tokens = kept.followed_by(fresh_tokens(1));
  operation.n = operation.tokens.size();
  return operation;
}

/// The accept of a row whose drafts are not known here: one token and, with steps ahead, the tokens
/// of drafts that are kept.
Operation RandomTrace::result(const LegalityModel::Request& request) {
  Operation operation{.verb = Verb::accept};
  operation.id = request.id;
  const std::int64_t drafts = request.rows.empty() ? 0 : request.rows.front().drafts;
  operation.tokens = fresh_tokens(1 + draw_.between(0, drafts));
  operation.n = operation.tokens.size();
  return operation;
}

/// Whether the next operation of the request is an accept with the tokens of its next result. In a
/// config with drafts, rows without drafts have such an accept as well.
bool RandomTrace::is_result_told(const LegalityModel::Request& request) {
  if (request.is_result_due()) return request.in_flight == 2 || draw_.chance(1, 3);
  const Config& config = swarm_.config;
  return swarm_.blocks && config.drafts > 0 && config.overlap == 0 && request.left() == 0 &&
         draw_.chance(1, 2);
}

/// The next turn of a session, told to a decoding request, which goes on in the same blocks. It is
/// drawn more often at the end of a block, where rejected drafts reached into the next block.
Tokens RandomTrace::next_turn(const LegalityModel::Request& request) {
  const std::int64_t left = request.left();
  if (swarm_.turns == 0 || request.is_cut || left > 1 || (left == 1 && !request.samples)) return {};
  const bool ends_block = request.computed % swarm_.block == 0;
  const std::uint64_t tenths = static_cast<std::uint64_t>(swarm_.turns) + (ends_block ? 4 : 0);
  if (!draw_.chance(tenths, 10)) return {};
  return fresh_tokens(draw_.between(2, 3 * swarm_.block));
}

/// A path from the root of the tree of drafts, which may end before a leaf.
Tokens RandomTrace::some_way(const LegalityModel::Request& request) {
  Tokens way;
  std::int64_t at = 0;
  for (std::uint32_t draft = 1; draft <= request.drafts.size(); ++draft) {
    if (request.parents[draft - 1] != at || !draw_.chance(2, 3)) continue;
    way.append(request.drafts.slice(draft - 1, draft));
    at = draft;
  }
  return way;
}

/// Makes the drafts a tree. Siblings are different tokens; otherwise the drafts stay a chain.
void RandomTrace::plant_tree(Operation& verification) {
  const Tokens& drafts = verification.drafts;
  for (std::uint32_t draft = 1; draft <= drafts.size(); ++draft) {
    std::int64_t parent = draw_.between(0, draft - 1);
    for (std::uint32_t other = 1; other < draft; ++other)
      if (verification.parents[other - 1] == parent && drafts[other - 1] == drafts[draft - 1])
        parent = draft - 1;
    verification.parents.push_back(parent);
  }
}

Operation RandomTrace::forward(const LegalityModel::Request& request) {
  Operation operation;
  operation.verb = Verb::extend;
  operation.id = request.id;
  // A load that ends later; what a second memory has comes in no other way.
  if (swarm_.blocks && request.external > 0 && (request.loads || draw_.chance(1, 2))) {
    operation.n = 0;
    operation.async = true;
    may_be_bad_ = true;  // if the cache has all tokens
    return operation;
  }
  std::int64_t most = request.left();
  if (request.is_on_first) {
    operation.n = draw_.chance(1, 3) ? most : draw_.between(1, most);
    return operation;
  }
  const bool overlaps = swarm_.config.overlap != 0;
  if (swarm_.blocks && !overlaps) operation.tokens = next_turn(request);
  // A server that cuts chunks samples only after all chunks are computed. With steps ahead, a row
  // samples one token.
  if (operation.tokens.empty() && (most == 0 || (!swarm_.blocks && draw_.chance(1, 3))))
    operation.tokens = fresh_tokens(swarm_.blocks && overlaps ? 1 : draw_.between(1, 4));
  most += operation.tokens.size();
  const bool is_whole =
      operation.tokens.size() > 4 || draw_.chance(1, swarm_.meetings == 0 ? 2 : 4);
  operation.n = is_whole ? most : draw_.between(1, most);
  operation.async = request.in_flight > 0 || (overlaps && (swarm_.blocks || draw_.chance(1, 2)));
  if (swarm_.blocks) return block_forward(operation, request, most);
  if (!operation.async && draw_.chance(static_cast<std::uint64_t>(swarm_.drafts), 10)) {
    operation.drafts = fresh_tokens(draw_.between(1, 3));
    if (sometimes(swarm_.trees)) {
      operation.drafts = operation.drafts.followed_by(fresh_tokens(draw_.between(1, 4)));
      plant_tree(operation);
    }
    operation.n = most + operation.drafts.size();
  }
  return operation;
}

/// A forward of a captured graph, which has more rows than requests.
Operation RandomTrace::padded_step() {
  Operation operation{.verb = Verb::step};
  for (const LegalityModel::Request& request : model_.requests())
    if (draw_.chance(3, 4)) operation.ids.push_back(request.id);
  operation.padded = std::ssize(operation.ids) + draw_.between(0, 3);
  return operation;
}

/// A forward of several requests, whose extends come next.
Operation RandomTrace::joint_step() {
  Operation operation{.verb = Verb::step};
  for (const LegalityModel::Request& request : model_.requests())
    if (request.drafts.empty() && request.in_flight == 0 && draw_.chance(3, 4))
      operation.ids.push_back(request.id);
  for (std::size_t i = operation.ids.size(); i > 1; --i)
    std::swap(operation.ids[i - 1], operation.ids[draw_.below(i)]);
  together_.assign(operation.ids.rbegin(), operation.ids.rend());
  return operation;
}

Operation RandomTrace::random_sequence_operation(const LegalityModel::Request& request) {
  Operation operation;
  operation.id = request.id;
  const std::int64_t there = request.computed;
  switch (pick<5>(
      draw_, {swarm_.clone, swarm_.truncate, swarm_.capture, swarm_.restore, swarm_.together})) {
    case 0:
      if (there == 0 || model_.requests().size() >= static_cast<std::size_t>(swarm_.running)) break;
      operation.verb = Verb::clone;
      operation.as = cloned_ = fresh_name("r");
      if (draw_.chance(1, 4)) operation.up_to = draw_.between(1, there);
      return operation;
    case 1:
      if (there < 2) break;
      operation.verb = Verb::truncate;
      operation.up_to = draw_.chance(1, 6) ? draw_.between(1, there)
                                           : std::max<std::int64_t>(1, there - draw_.between(1, 4));
      return operation;
    case 2:
      if (there == 0) break;
      operation.verb = Verb::capture;
      operation.as = Name::intern(fmt::format("s{}", draw_.below(4)));
      operation.partial = draw_.chance(1, 3);
      return operation;
    case 3:
      if (const auto restored = restoration(request)) return *restored;
      break;
    default: return joint_step();
  }
  return forward(request);
}

/// A restore of a drawn capture, if the request can be set back to it.
std::optional<Operation> RandomTrace::restoration(const LegalityModel::Request& request) {
  if (model_.captured().empty()) return std::nullopt;
  const LegalityModel::Captured& kept = model_.captured()[draw_.below(model_.captured().size())];
  if (!LegalityModel::can_restore(request, kept)) return std::nullopt;
  Operation operation{.verb = Verb::restore};
  operation.id = request.id;
  operation.from = kept.name;
  return operation;
}

/// Adds drafts to a forward of a block cache: after one sampled token, and at most config drafts.
Operation RandomTrace::block_forward(Operation operation, const LegalityModel::Request& request,
                                     std::int64_t most) {
  const std::int64_t drafts = swarm_.config.drafts;
  const bool decodes = most == 1 && (request.samples || operation.tokens.size() == 1);
  if (drafts > 0 && decodes && draw_.chance(static_cast<std::uint64_t>(swarm_.drafts), 10)) {
    operation.drafts = fresh_tokens(draw_.between(1, drafts));
    operation.n = most + operation.drafts.size();
  }
  return operation;
}

/// Plans a meeting: a running request is about to fill blocks. Before it does, a request is
/// computed whose prompt is the same up to a place inside the first of these blocks; in the step
/// that fills them, another request with the same prompt is admitted. This tests that a block is
/// offered only once it is filled.
bool RandomTrace::begin_meeting() {
  for (const LegalityModel::Request& request : model_.requests()) {
    if (request.computed == 0 || request.left() <= swarm_.block || !request.drafts.empty() ||
        request.in_flight != 0 || request.is_loading || !draw_.chance(1, 2))
      continue;
    met_ = request.id;
    met_at_ = request.computed;
    meeting_ = {Meeting::step, Meeting::last, Meeting::late, Meeting::first,
                Meeting::step, Meeting::last, Meeting::cut};
    return true;
  }
  return false;
}

/// The next operation of the meeting; nothing if the meeting cannot go on.
std::optional<Operation> RandomTrace::meet() {
  const Meeting next = meeting_.back();
  meeting_.pop_back();
  const std::vector<LegalityModel::Request>& running = model_.requests();
  const LegalityModel::Request* const first = model_.find_request(met_);
  if (next == Meeting::step) return Operation{.verb = Verb::step};
  if (first == nullptr || !first->drafts.empty()) {
    meeting_.clear();
    return std::nullopt;
  }
  if (next == Meeting::first || next == Meeting::last) {
    const LegalityModel::Request& one = next == Meeting::first ? *first : running.back();
    const std::int64_t left = one.left();
    // An admission that was refused leaves another request behind.
    if (left == 0 || one.is_loading || !one.drafts.empty()) return std::nullopt;
    if (one.loads && one.external > 0) return forward(one);
    Operation operation{.verb = Verb::extend};
    operation.id = one.id;
    const bool is_whole = next == Meeting::last || draw_.chance(1, 2);
    operation.n = is_whole ? left : draw_.between(std::min(left, swarm_.block), left);
    operation.async = swarm_.config.overlap != 0;
    return operation;
  }
  Operation admit{.verb = Verb::admit};
  admit.id = fresh_name("r");
  admit.salt = first->salt;
  admit.tokens = first->known;
  const std::int64_t size = admit.tokens.size();
  const bool is_late = next == Meeting::late;
  if (!is_late || draw_.chance(1, 2)) {
    const std::int64_t most = is_late ? size : std::min(size, met_at_ + swarm_.block);
    admit.tokens =
        admit.tokens.prefix(static_cast<std::uint32_t>(draw_.between(met_at_ + 1, most)));
  }
  if (draw_.chance(1, 4)) admit.tokens = admit.tokens.followed_by(fresh_tokens(1));
  return admit;
}

Operation RandomTrace::random_request_operation() {
  const auto most = static_cast<std::size_t>(swarm_.running);
  const std::vector<LegalityModel::Request>& running = model_.requests();
  if (swarm_.blocks) {
    // A look-up in a block cache is outdated if it is not used at once.
    const bool is_new = running.size() > known_running_;
    known_running_ = running.size();
    if (is_new && !running.back().is_loading && draw_.chance(7, 8)) return forward(running.back());
    if (running.size() < most && sometimes(swarm_.meetings) && begin_meeting())
      if (const auto first = meet()) return *first;
    if (draw_.chance(1, 4)) return Operation{.verb = Verb::step};
  }
  if (sometimes(swarm_.padded) && draw_.chance(1, 3)) return padded_step();
  // Others that come while a load is in flight find what it brings.
  if (swarm_.copies != 0 && !running.empty() && running.back().loads && running.size() < most &&
      draw_.chance(1, 3)) {
    Operation admit{.verb = Verb::admit};
    admit.id = fresh_name("r");
    admit.salt = running.back().salt;
    admit.tokens = running.back().known.followed_by(fresh_tokens(1));
    return admit;
  }
  if (refused_ && running.size() < most && draw_.chance(1, 3)) return *refused_;
  if (running.empty() || (running.size() < most && draw_.chance(1, 4))) return admission();
  // An engine may copy a clone late, which shows if the clone changes before the next forward.
  const bool is_new_clone = cloned_.exists() && running.back().id == cloned_;
  cloned_ = Name();
  if (is_new_clone && draw_.chance(1, 3))
    if (const auto restored = restoration(running.back())) return *restored;
  const LegalityModel::Request& request = running[draw_.below(running.size())];
  if (!request.drafts.empty()) return verdict(request);
  if (is_result_told(request)) return result(request);
  if (request.in_flight == 0 && swarm_.sequences != 0 &&
      draw_.chance(static_cast<std::uint64_t>(swarm_.sequences), 10))
    return random_sequence_operation(request);
  Operation operation;
  operation.id = request.id;
  if (request.is_on_first &&
      (request.left() == 0 || draw_.chance(static_cast<std::uint64_t>(swarm_.moves), 30))) {
    operation.verb = Verb::load;
    return operation;
  }
  if (request.is_loading) {
    operation.verb = draw_.chance(1, 8) ? Verb::abort : Verb::complete;
    return operation;
  }
  if (request.in_flight > 0 && !request.is_result_due() &&
      (request.in_flight == 2 || draw_.chance(1, 4))) {
    operation.verb = Verb::complete;
    return operation;
  }
  switch (pick<5>(
      draw_, {swarm_.extend, swarm_.checkpoint, swarm_.finish, swarm_.abort, swarm_.preempt})) {
    case 0: return forward(request);
    case 1:
      operation.verb = Verb::checkpoint;
      if (draw_.chance(1, 5)) operation.up_to = draw_.between(0, request.computed);
      break;
    case 2:
      operation.verb = swarm_.blocks && request.left() > 0 ? Verb::abort : Verb::finish;
      operation.insert = operation.verb == Verb::abort ||
                         !draw_.chance(static_cast<std::uint64_t>(swarm_.discarded), 10);
      if (operation.verb == Verb::finish && operation.insert && sometimes(swarm_.cuts))
        operation.up_to = std::max<std::int64_t>(1, request.known.size() - draw_.between(0, 3));
      break;
    case 3: operation.verb = Verb::abort; break;
    default: operation.verb = Verb::preempt; break;
  }
  return operation;
}

Operation RandomTrace::use_of_slot(const LegalityModel::Slot& slot) {
  Operation operation;
  const std::uint64_t choice = draw_.below(8);
  const Tokens& held = slot.tokens;
  const bool fits_a_key =
      !held.empty() && held.size() % swarm_.config.page == 0;  // keys consist of whole pages
  if (!fits_a_key || choice < 2) {
    operation.verb = Verb::advance;
    operation.slot = slot.name;
    operation.tokens = held.empty() ? some_tokens() : fresh_tokens(draw_.between(1, 6));
  } else if (choice < 6) {
    operation.verb = Verb::insert;
    operation.slot = slot.name;
    operation.tokens = held;
    operation.salt = some_salt();
    const auto& node = model_.shown();
    if (node && node->salt == operation.salt && node->tokens.size() <= held.size() &&
        held.prefix(node->tokens.size()) == node->tokens && draw_.below(2) == 0)
      operation.prev = node->tokens.size();
    else
      overstate_prev(operation);
    may_be_bad_ |= operation.prev > 0 && swarm_.copies != 0;  // its KV may be on the host alone
  } else if (choice == 6) {
    operation.verb = Verb::free;
    operation.slot = slot.name;
  } else {
    operation.verb = Verb::fork;
    operation.slot = slot.name;
    operation.as = fresh_name("f");
  }
  return operation;
}

/// Sometimes makes an insert claim that the tree stores more of its tokens than any reply has said.
void RandomTrace::overstate_prev(Operation& insert) {
  if (!draw_.chance(static_cast<std::uint64_t>(swarm_.bad), 20)) return;
  const auto page = static_cast<std::uint64_t>(swarm_.config.page);
  const std::uint64_t pages = insert.tokens.size() / page;
  insert.prev =
      static_cast<std::int64_t>((draw_.chance(1, 2) ? pages : draw_.below(pages + 1)) * page);
  may_be_bad_ = true;
}

Operation RandomTrace::random_tree_operation() {
  Operation operation;
  const auto& node = model_.shown();
  if (node && draw_.below(2) == 0) {
    operation.verb = Verb::lock;
    operation.tokens = node->tokens;
    operation.salt = node->salt;
    operation.as = fresh_name("l");
    return operation;
  }
  const std::uint64_t choice = draw_.below(12);
  const std::vector<Name>& locks = model_.locks();
  if (!locks.empty() && choice < 3) {
    operation.verb = Verb::unlock;
    operation.lock = locks[draw_.below(locks.size())];
    return operation;
  }
  if (choice < 6) {
    operation.verb = Verb::match;
    operation.tokens = some_tokens();
    operation.salt = some_salt();
    if (draw_.below(4) == 0)
      operation.limit = static_cast<std::int64_t>(draw_.below(operation.tokens.size() + 3));
    return operation;
  }
  if (!has_states_) {
    operation.verb = Verb::insert;
    if (node && draw_.below(2) == 0) {  // the insert counts on the node that the last reply named
      operation.prev = node->tokens.size();
      operation.tokens = node->tokens.followed_by(fresh_tokens(draw_.between(0, 8)));
      operation.salt = node->salt;
      return operation;
    }
    operation.tokens = some_tokens();
    operation.salt = some_salt();
    overstate_prev(operation);
    return operation;
  }
  const std::vector<LegalityModel::Slot>& slots = model_.slots();
  if (slots.size() >= 2 && choice == 6) {
    operation.verb = Verb::copy;
    operation.from = slots[draw_.below(slots.size())].name;
    operation.to = slots[draw_.below(slots.size())].name;
    return operation;
  }
  if (!slots.empty() && choice < 11) return use_of_slot(slots[draw_.below(slots.size())]);
  operation.verb = Verb::alloc;
  operation.as = fresh_name("s");
  return operation;
}

/// Captures the computed tokens of a request, restores a capture into a request that has computed
/// nothing, or compacts the rows: permutes them and drops rows whose requests have ended.
Operation RandomTrace::random_slot_operation() {
  Operation operation;
  const std::vector<LegalityModel::Request>& running = model_.requests();
  for (const LegalityModel::Request& request : running)
    for (const LegalityModel::Captured& captured : model_.captured()) {
      const std::uint32_t size = captured.tokens.size();
      if (request.computed != 0 || !request.drafts.empty() || request.salt != captured.salt ||
          request.known.size() <= size || request.known.prefix(size) != captured.tokens ||
          !draw_.chance(2, 3))
        continue;
      operation.verb = Verb::restore;
      operation.id = request.id;
      operation.from = captured.name;
      return operation;
    }
  if (!running.empty() && draw_.chance(1, 2)) {
    const LegalityModel::Request& request = running[draw_.below(running.size())];
    if (request.computed > 0 && request.drafts.empty()) {
      operation.verb = Verb::capture;
      operation.id = request.id;
      operation.as = Name::intern(draw_.chance(1, 2) ? "p" : "q");
      return operation;
    }
  }
  operation.verb = Verb::check;
  for (const LegalityModel::Request& request : running)
    if (!request.drafts.empty()) return operation;
  operation.verb = Verb::compact;
  std::vector<std::int64_t> order;
  for (const Name row : model_.rows())
    if (row.exists()) order.push_back(static_cast<std::int64_t>(order.size()));
  if (draw_.chance(1, 4))
    for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[draw_.below(i)]);
  std::size_t kept = 0;
  for (const Name row : model_.rows())
    operation.mapping.push_back(row.exists() ? order[kept++] : -1);
  if (operation.mapping.empty()) operation.verb = Verb::check;
  return operation;
}

/// Ends copies between the host and the disk, or empties the disk.
Operation RandomTrace::random_disk_operation() {
  Operation operation{.verb = draw_.chance(1, 8) ? Verb::fail : Verb::land};
  operation.tier = Name::intern("disk");
  if (draw_.chance(1, 40)) operation.verb = Verb::evict;
  if (swarm_.disk_ranks > 1 && operation.verb != Verb::evict && draw_.chance(1, 4)) {
    operation.verb = Verb::fail;
    operation.rank = draw_.between(0, swarm_.disk_ranks - 1);
  }
  if (operation.verb == Verb::evict || draw_.chance(1, 3)) return operation;
  operation.from = operation.tier;
  operation.tier = Name::intern("host");
  return operation;
}

/// The refused admission asks again when the load that it has started is there.
void RandomTrace::ask_again() {
  Operation land{.verb = Verb::land};
  land.from = Name::intern("disk");
  land.tier = Name::intern("host");
  if (!swarm_.prefetches) {
    asking_ = {*refused_, land, Operation{.verb = Verb::step}};
    return;
  }
  // The last one comes first. Some of them are left out, or the deadline passes.
  const Operation settle{.verb = Verb::settle};
  asking_ = {*refused_};
  asking_.front().late = draw_.chance(1, 4);
  if (draw_.chance(1, 3)) {  // its prefix leaves the device meanwhile, and perhaps the host
    Operation evict{.verb = Verb::evict};
    evict.kv =
        draw_.chance(1, 2) ? std::int64_t{4} * swarm_.longest : draw_.between(1, swarm_.longest);
    evict.tier = Name::intern("host");
    if (draw_.chance(1, 2)) asking_.push_back(evict);
    evict.tier = Name();
    asking_.push_back(evict);
    asking_.push_back(settle);
    return;
  }
  for (const Operation& next : {settle, land, land, settle})
    if (draw_.chance(7, 8)) asking_.push_back(next);
}

/// The lines by which a slot of its own stores a prefix, of which the cache has `prev` tokens.
void RandomTrace::store_by_slot(const Tokens& tokens, std::int64_t prev,
                                std::vector<Operation>& order) {
  Operation next{.verb = Verb::alloc};
  next.as = fresh_name("s");
  order.push_back(next);
  next.slot = std::exchange(next.as, Name());
  next.tokens = tokens;
  next.verb = Verb::advance;
  order.push_back(next);
  next.verb = Verb::insert;
  next.prev = prev;
  order.push_back(next);
}

/// Stores two prefixes of a prompt, which asks while it has the longer one; then that one goes from
/// all tiers but the disk, and when it has asked again, the shorter one goes from the device.
void RandomTrace::shrink_while_waiting() {
  Operation admit{.verb = Verb::admit};
  admit.id = fresh_name("r");
  admit.tokens = some_tokens();
  if (admit.tokens.size() < 3) return;
  const std::int64_t longer = draw_.between(2, admit.tokens.size() - 1);
  std::vector<Operation> order;
  for (const std::int64_t size : {draw_.between(1, longer - 1), longer})
    store_by_slot(admit.tokens.prefix(static_cast<std::uint32_t>(size)), Operation::kAbsent, order);
  for (const char* const tier : {"host", "disk"}) {
    Operation land{.verb = Verb::land};
    land.tier = Name::intern(tier);
    order.insert(order.end(), {land, land, Operation{.verb = Verb::settle}});
  }
  order.insert(order.end(), {admit, Operation{.verb = Verb::settle}});
  Operation evict{.verb = Verb::evict};
  evict.kv = 1;
  order.push_back(evict);
  evict.tier = Name::intern("host");
  order.insert(order.end(), {evict, admit});
  evict.tier = Name();
  order.insert(order.end(), {evict, admit});
  asking_.assign(order.rbegin(), order.rend());
  refused_ = admit;
}

/// Stores two prefixes of a prompt on the disks, one after the other, and each of them not on one
/// rank. Nothing else is left of them when the prompt asks for what the ranks have.
void RandomTrace::store_apart_on_ranks() {
  Operation admit{.verb = Verb::admit};
  admit.id = fresh_name("r");
  admit.tokens = some_tokens();
  if (admit.tokens.size() < 3) return;
  const std::int64_t longer = draw_.between(2, admit.tokens.size() - 1);
  std::vector<Operation> order{Operation{.verb = Verb::flush}};
  for (const std::int64_t size : {longer, draw_.between(1, longer)}) {
    store_by_slot(admit.tokens.prefix(static_cast<std::uint32_t>(size)), Operation::kAbsent, order);
    Operation land{.verb = Verb::land};
    land.tier = Name::intern("host");
    order.insert(order.end(), {land, Operation{.verb = Verb::settle}});
    land.verb = Verb::fail;
    land.tier = Name::intern("disk");
    land.rank = draw_.between(0, swarm_.disk_ranks - 1);
    order.insert(order.end(), {land, Operation{.verb = Verb::flush}});
  }
  order.insert(order.end(), {admit, Operation{.verb = Verb::settle}});
  asking_.assign(order.rbegin(), order.rend());
  refused_ = admit;
}

/// A prefix of a prompt that a request holds gets a state of its own, when what nobody holds has
/// left the device. Before the copy of that state has landed, another prompt is stored.
void RandomTrace::add_state_to_held_prefix() {
  const std::int64_t page = swarm_.config.page;
  const auto pages = [&](const Tokens& tokens, std::int64_t count) {
    return tokens.prefix(static_cast<std::uint32_t>(count * page));
  };
  Operation admit{.verb = Verb::admit};
  admit.id = fresh_name("r");
  admit.tokens = some_tokens();
  const std::int64_t stored = (std::int64_t{admit.tokens.size()} - 1) / page;
  const Tokens other = some_tokens();
  if (stored < 2 || other.size() < page) return;
  const std::int64_t held = draw_.between(1, stored - 1);
  std::vector<Operation> order;
  store_by_slot(pages(admit.tokens, stored), Operation::kAbsent, order);
  order.insert(order.end(), {admit, Operation{.verb = Verb::flush}});
  store_by_slot(pages(admit.tokens, held), held * page, order);
  store_by_slot(pages(other, other.size() / page), Operation::kAbsent, order);
  asking_.assign(order.rbegin(), order.rend());
}

/// Ends copies between two servers, settles their transfers, or evicts from one of them.
Operation RandomTrace::random_move_operation() {
  Operation operation{.verb = draw_.chance(1, 12) ? Verb::fail : Verb::land};
  operation.tier = Name::intern("decode");
  const std::vector<LegalityModel::Request>& running = model_.requests();
  switch (pick<3>(draw_, {5, 4, 1})) {
    case 0:
      if (!running.empty() && draw_.chance(1, 3))
        operation.id = running[draw_.below(running.size())].id;
      return operation;
    case 1: return Operation{.verb = Verb::settle};
    default:
      operation.verb = Verb::evict;
      if (draw_.chance(1, 2)) operation.tier = Name::intern("prefill");
      operation.kv = draw_.between(0, swarm_.longest);
      operation.state = draw_.between(0, 2);
      return operation;
  }
}

/// Lands or settles copies between tiers, or evicts from the host.
Operation RandomTrace::random_copy_operation() {
  if (swarm_.moves != 0) return random_move_operation();
  if (swarm_.has_disk && draw_.chance(1, 2)) return random_disk_operation();
  Operation operation{.verb = Verb::land};
  switch (pick<4>(draw_, {3, 2, 3, 1})) {
    case 0: operation.tier = Name::intern("host"); return operation;
    case 1: operation.tier = Name::intern("device"); return operation;
    case 2: operation.verb = Verb::settle; return operation;
    default:
      operation.verb = Verb::evict;
      operation.tier = Name::intern("host");
      operation.kv = draw_.between(0, swarm_.longest);
      operation.state = draw_.between(0, 2);
      return operation;
  }
}

Operation RandomTrace::next() {
  may_be_bad_ = false;
  if (refused_ && model_.find_request(refused_->id) != nullptr) refused_.reset();
  if (refused_ && asking_.empty() && draw_.chance(1, 4)) ask_again();
  if (swarm_.prefetches && swarm_.tree != 0 && asking_.empty() && draw_.chance(1, 60))
    shrink_while_waiting();
  if (swarm_.disk_ranks > 1 && swarm_.tree != 0 && asking_.empty() && draw_.chance(1, 40))
    store_apart_on_ranks();
  if (swarm_.backs_windows_up && swarm_.tree != 0 && asking_.empty() && draw_.chance(1, 40))
    add_state_to_held_prefix();
  while (!asking_.empty()) {
    Operation next = std::move(asking_.back());
    asking_.pop_back();
    const auto& slots = model_.slots();
    const bool has_slot = !next.slot.exists() || std::ranges::any_of(slots, [&](const auto& slot) {
      return slot.name == next.slot;
    });
    const bool is_admitted = next.verb == Verb::admit && model_.find_request(next.id) != nullptr;
    if (!has_slot || is_admitted) continue;
    may_be_bad_ = next.prev > 0;  // its KV may be gone
    return next;
  }
  while (!together_.empty()) {
    const Name id = together_.back();
    together_.pop_back();
    for (const LegalityModel::Request& request : model_.requests()) {
      if (request.id != id || !request.drafts.empty()) continue;
      if (!draw_.chance(1, 12)) return forward(request);
      // the client leaves while the forward is being composed
      Operation leaves{.verb = Verb::abort};
      leaves.id = id;
      return leaves;
    }
  }
  while (!meeting_.empty())
    if (const auto met = meet()) return *met;
  Operation operation;
  if (model_.bare_lock().exists()) {
    operation.verb = Verb::unlock;
    operation.lock = model_.bare_lock();
    return operation;
  }
  switch (pick<7>(draw_, {swarm_.request, swarm_.tree, swarm_.evict, swarm_.check, swarm_.flush,
                          swarm_.slots, swarm_.copies})) {
    case 0: return random_request_operation();
    case 1: return random_tree_operation();
    case 2:
      operation.verb = Verb::evict;
      if (swarm_.rooms && draw_.chance(1, 2)) {
        operation.room = draw_.between(0, std::int64_t{2} * swarm_.longest);
        return operation;
      }
      operation.kv = draw_.between(0, swarm_.longest);
      operation.state = draw_.between(0, 2);
      return operation;
    case 3: return operation;  // check
    case 4: operation.verb = Verb::flush; return operation;
    case 5: return random_slot_operation();
    default: return random_copy_operation();
  }
}

std::vector<Operation> RandomTrace::ending() {
  std::vector<Operation> all;
  Operation operation;
  const auto unlock = [&](Name lock) {
    operation = Operation{.verb = Verb::unlock};
    operation.lock = lock;
    all.push_back(operation);
  };
  const Name bare = model_.bare_lock();
  if (bare.exists()) unlock(bare);
  for (auto request = model_.requests().rbegin(); request != model_.requests().rend(); ++request) {
    const bool is_cut = swarm_.blocks && request->left() > 0;
    const bool aborts = draw_.below(2) == 0 || !request->drafts.empty() || is_cut;
    operation = Operation{.verb = aborts ? Verb::abort : Verb::finish};
    operation.id = request->id;
    all.push_back(operation);
  }
  for (auto lock = model_.locks().rbegin(); lock != model_.locks().rend(); ++lock)
    if (*lock != bare) unlock(*lock);
  for (auto slot = model_.slots().rbegin(); slot != model_.slots().rend(); ++slot) {
    operation = Operation{.verb = Verb::free};
    operation.slot = slot->name;
    all.push_back(operation);
  }
  return all;
}

}  // namespace lockstep::cache_sim
