#include "cache_sim/check/closed_subject.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/mix.hpp"
#include "reference/protocol/host_tier.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <vector>

namespace lockstep::cache_sim {
namespace {

constexpr std::int64_t kNoLimit = std::numeric_limits<std::int64_t>::max();

}  // namespace

void ClosedSubject::check(const Operation& operation, const Reply& reply, Findings& findings) {
  check_progress(operation, findings);
  if (reply.refused != Refusal::none) return;
  check_numbers(operation, reply, findings);
  if (operation.verb == Verb::check) {
    check_sums(reply, findings);
    check_locks(reply, findings);
  }
  check_all_free(operation, reply, findings);
  if (operation.verb == Verb::extend) check_chunk(operation, reply, findings);
  if (operation.verb == Verb::admit) {
    const Content prompt = content_of(operation);
    const std::int64_t cached = reply.get(ReplyField::cached);
    const std::int64_t most = std::max(most_cached(prompt), operation.external);
    // A hit of the whole prompt is reported elsewhere, for every subject.
    if (cached > most && cached < std::int64_t{operation.tokens.size()})
      findings.push_back({FindingKind::cached_too_much,
                          fmt::format("{} {} said to be cached, and of this prompt no more than {} "
                                      "were ever computed before",
                                      counted(cached, "token"), is_or_are(cached), most),
                          fmt::format("at most {}", most), std::to_string(cached)});
    if (const std::int64_t least = least_cached(prompt); cached < least)
      findings.push_back(
          {FindingKind::missed_reuse,
           fmt::format("{} {} said to be cached of a prompt that goes on from a "
                       "finished request: rehits={} promises {}, and all that was "
                       "ever computed fits into the memory",
                       counted(cached, "token"), is_or_are(cached), promises_.rehits, least),
           fmt::format("at least {}", least), std::to_string(cached)});
  }
  follow_promise(operation);
  follow(operation, reply);
  if (reply.has(ReplyField::output)) check_output(operation, reply, findings);
}

/// Greedy decoding is a function of the tokens alone, whatever was cached, forked or restored
/// before.
void ClosedSubject::check_output(const Operation& operation, const Reply& reply,
                                 Findings& findings) {
  const Request* const request = find(operation.id);
  if (request == nullptr) return;
  const Tokens tokens = request->known.prefix(static_cast<std::uint32_t>(request->computed))
                            .followed_by(request->verifies ? operation.drafts : Tokens());
  const std::int64_t output = reply.get(ReplyField::output);
  const auto [known, fresh] = sampled_.emplace(std::pair(request->space.index(), tokens.digest()),
                                               Sampled{output, operation.id});
  if (fresh || known->second.output == output) return;
  findings.push_back({FindingKind::output_differs,
                      fmt::format("request `{}` goes on with token {} after {}, and request `{}` "
                                  "went on with {} after the same",
                                  operation.id.text(), output, counted(tokens.size(), "token"),
                                  known->second.id.text(), known->second.output),
                      fmt::format("output={}", known->second.output),
                      fmt::format("output={}", output)});
}

/// Checks each number of the reply by itself against the largest possible value.
void ClosedSubject::check_numbers(const Operation& operation, const Reply& reply,
                                  Findings& findings) const {
  for (std::size_t i = 0; i < kReplyFieldCount; ++i) {
    const auto field = static_cast<ReplyField>(i);
    if (!reply.has(field)) continue;
    const std::int64_t most = largest(field, operation);
    if (reply.get(field) <= most) continue;
    findings.push_back(
        {FindingKind::out_of_range,
         fmt::format("`{}` was answered with {}={}, which cannot be more than {}",
                     to_string(operation.verb), to_string(field), reply.get(field), most),
         fmt::format("at most {}", most), std::to_string(reply.get(field))});
  }
}

/// The largest number that the field can have in an answer to this operation.
std::int64_t ClosedSubject::largest(ReplyField field, const Operation& operation) const {
  const Request* const request = find(operation.id);
  const std::int64_t tokens =
      operation.tokens.size() + (request == nullptr ? 0 : request->known.size());
  const bool evicts = operation.verb == Verb::evict || operation.verb == Verb::flush;
  if (evicts && operation.tier.exists()) return kNoLimit;  // a tier may hold more than the pools
  switch (field) {
    case ReplyField::n:
      return capability_of(operation.verb) == Capability::tiers ? kNoLimit : operation.n;
    case ReplyField::exist: return std::max<std::int64_t>(tokens, 1);
    case ReplyField::length:
      return capability_of(operation.verb) == Capability::tree ? kNoLimit : tokens;
    case ReplyField::freed_kv:
    case ReplyField::branch:
    case ReplyField::junction:
    case ReplyField::conv: return tokens;
    case ReplyField::state: return evicts ? config_.state_slots : tokens;
    case ReplyField::kv: return evicts || operation.verb == Verb::admit ? kv_total_ : tokens;
    case ReplyField::kv_free:
    case ReplyField::kv_locked:
    case ReplyField::evicted_kv: return kv_total_;
    case ReplyField::states_free:
    case ReplyField::states_locked:
    case ReplyField::evicted_states: return config_.state_slots;
    default: return kNoLimit;
  }
}

/// Free slots and locked slots are disjoint parts of one pool, so their sum is at most its size.
void ClosedSubject::check_sums(const Reply& reply, Findings& findings) const {
  if (!findings.empty()) return;  // the sum of impossible numbers says nothing more
  const auto compare = [&](const char* what, ReplyField free, ReplyField locked,
                           std::int64_t total) {
    const std::int64_t sum = reply.get(free) + reply.get(locked);
    if (sum <= total) return;
    findings.push_back({FindingKind::size_accounting,
                        fmt::format("{} {} are free and {} are locked, of {}", reply.get(free),
                                    what, reply.get(locked), total),
                        fmt::format("at most {}", total), std::to_string(sum)});
  };
  compare("KV slots", ReplyField::kv_free, ReplyField::kv_locked, kv_total_);
  compare("state slots", ReplyField::states_free, ReplyField::states_locked, config_.state_slots);
}

/// Reports locks that are too few for what running requests were given by `cached=`: a prefix of
/// several of them counts once.
void ClosedSubject::check_locks(const Reply& reply, Findings& findings) const {
  if (promises_.locks == 0 || !reply.has(ReplyField::kv_locked)) return;
  PrefixTrie hits;
  std::int64_t least = 0;
  for (const auto& [name, request] : requests_) {
    const Tokens hit = request.known.prefix(static_cast<std::uint32_t>(request.hit));
    least += request.hit - hits.longest_common(hit, request.space);
    if (request.hit > 0) hits.insert(hit, request.space);
  }
  const std::int64_t locked = reply.get(ReplyField::kv_locked);
  if (locked * promises_.locks >= least) return;
  findings.push_back({FindingKind::size_accounting,
                      fmt::format("kv_locked={} of {} each, and the requests that run were given "
                                  "{} of the cache, which locks={} promises to lock",
                                  locked, counted(promises_.locks, "token"),
                                  counted(least, "token"), promises_.locks),
                      fmt::format("at least {}", (least - 1) / promises_.locks + 1),
                      std::to_string(locked)});
}

/// Reports memory that was free before, and is not after a flush while no request runs. With
/// `overlap` or another tier a step or a copy may still use it.
void ClosedSubject::check_all_free(const Operation& operation, const Reply& reply,
                                   Findings& findings) {
  only_requests_ &= capability_of(operation.verb) == Capability::request;
  flushed_ = operation.verb == Verb::flush || (flushed_ && operation.verb == Verb::check);
  const bool all_free = flushed_ && only_requests_ && requests_.empty() && config_.overlap == 0 &&
                        !has_host_tier(config_) && !has_disk(config_);
  const auto compare = [&](const char* what, ReplyField field, std::int64_t& most) {
    if (!reply.has(field)) return;
    const std::int64_t now = reply.get(field);
    most = std::max(most, now);
    if (!all_free || now == most) return;
    findings.push_back({FindingKind::leak,
                        fmt::format("{} {} are free after a flush with no request running, and {} "
                                    "were before",
                                    now, what, most),
                        fmt::format("at least {}", most), std::to_string(now)});
  };
  compare("KV slots", ReplyField::kv_free, kv_free_);
  compare("state slots", ReplyField::states_free, states_free_);
}

/// Reports a chunk of a prompt that is not its last and ends off the promised grid.
void ClosedSubject::check_chunk(const Operation& operation, const Reply& reply,
                                Findings& findings) const {
  const Request* const request = find(operation.id);
  const std::int64_t n = reply.get(ReplyField::n);
  if (promises_.chunks == 0 || request == nullptr || n == 0 || !operation.drafts.empty()) return;
  const std::int64_t known = std::int64_t{request->known.size()} + operation.tokens.size();
  const std::int64_t end = request->computed + n;
  if (end >= known || end % promises_.chunks == 0) return;
  findings.push_back({FindingKind::out_of_range,
                      fmt::format("a chunk of request `{}` ends after {} of {}, which is no "
                                  "multiple of {}, as chunks={} promises",
                                  operation.id.text(), end, counted(known, "token"),
                                  promises_.chunks, promises_.chunks),
                      fmt::format("a multiple of {}", promises_.chunks), std::to_string(end)});
}

/// Reports a token that is sampled, or a request that finishes, before all tokens up to there were
/// computed by the answers to `extend`. The driver of the server believes them computed, and the
/// server never says that they are not.
void ClosedSubject::check_progress(const Operation& operation, Findings& findings) const {
  const Request* const request = find(operation.id);
  if (request == nullptr) return;
  const bool samples = operation.verb == Verb::accept || operation.verb == Verb::finish ||
                       (operation.verb == Verb::extend && !operation.tokens.empty());
  const std::int64_t missing = request->asked - request->computed + request->unanswered;
  if (!samples || missing <= 0) return;
  findings.push_back(
      {FindingKind::stuck,
       fmt::format("request `{}` goes on with `{}`, and {} of the {} asked for {} not "
                   "computed, by the n= of the answers to extend",
                   operation.id.text(), to_string(operation.verb), missing,
                   counted(request->asked + request->unanswered, "token"), is_or_are(missing)),
       "every token is computed before the next one is sampled",
       fmt::format("{} {} missing", missing, is_or_are(missing))});
}

ClosedSubject::Content ClosedSubject::content_of(const Operation& admission) {
  Content content{admission.tokens, admission.salt};
  if (admission.lora.exists())
    content.space = Name::intern(fmt::format(
        "{}\n{}", admission.salt.exists() ? admission.salt.text() : "", admission.lora.text()));
  if (admission.images.empty()) return content;
  std::vector<Token> tokens = content.tokens.values();
  for (const ImageSpan& image : admission.images) {
    if (!image.name.exists()) continue;  // the tokens identify the image
    for (std::uint32_t i = image.begin; i < std::min<std::size_t>(image.end(), tokens.size());
         ++i) {
      // A document number in the upper half of the range, where hashed names of documents lie as
      // well.
      const auto document = static_cast<Document>(mix64(mix64(tokens[i]) ^ image.name.index()) |
                                                  std::uint64_t{1} << 31);
      tokens[i] = token_of(document, i - image.begin);
    }
  }
  content.tokens = Tokens::of_values(tokens);
  return content;
}

/// The length of the longest prefix of the prompt that any request has computed.
std::int64_t ClosedSubject::most_cached(const Content& prompt) const {
  std::uint32_t most = computed_.longest_common(prompt.tokens, prompt.space);
  for (const auto& [name, request] : requests_) {
    if (request.space != prompt.space) continue;
    const auto there =
        static_cast<std::uint32_t>(std::min<std::int64_t>(request.computed, prompt.tokens.size()));
    most = std::max(most, prompt.tokens.common(0, request.known, 0, there));
  }
  return most;
}

/// The tokens that a promise of `rehits` covers in the prompt: all tokens of a request that has
/// finished, in whole multiples, as long as nothing has to make room for anything. A forward
/// computes at least one token.
std::int64_t ClosedSubject::least_cached(const Content& prompt) const {
  if (promises_.rehits == 0 || promise_ends_) return 0;
  const std::int64_t size = prompt.tokens.size();
  std::int64_t needed = ended_tokens_ + in_pages(size);
  for (const auto& [name, request] : requests_) needed += in_pages(request.known.size());
  const bool fits = needed <= std::min(config_.kv_tokens, kv_total_) &&
                    (config_.state_slots == 0 || 2 * (states_taken_ + 1) <= config_.state_slots);
  if (!fits) return 0;
  std::int64_t longest = 0;
  for (const Content& one : finished_)
    if (one.space == prompt.space && one.tokens.size() <= prompt.tokens.size() &&
        prompt.tokens.common(0, one.tokens, 0, one.tokens.size()) == one.tokens.size())
      longest = std::max<std::int64_t>(longest, one.tokens.size());
  return std::min(longest, size - 1) / promises_.rehits * promises_.rehits;
}

/// With room for a token that is sampled and not yet known.
std::int64_t ClosedSubject::in_pages(std::int64_t tokens) const {
  const std::int64_t page = std::max<std::int64_t>({config_.page, promises_.rehits, 1});
  return (tokens / page + 1) * page;
}

/// Before the operation changes the requests.
void ClosedSubject::follow_promise(const Operation& operation) {
  if (promises_.rehits == 0) return;
  const auto found = requests_.find(operation.id.index());
  switch (operation.verb) {
    case Verb::admit:
    case Verb::checkpoint: ++states_taken_; return;
    case Verb::finish:
    case Verb::abort:
    case Verb::preempt: {
      if (found == requests_.end()) return;
      const Request& request = found->second;
      ended_tokens_ += in_pages(request.known.size());
      const bool whole = operation.verb == Verb::finish && operation.insert &&
                         operation.up_to == Operation::kAbsent && !request.verifies;
      if (whole)
        finished_.push_back(
            {request.known.prefix(static_cast<std::uint32_t>(request.computed)), request.space});
      return;
    }
    case Verb::extend:
    case Verb::accept:
    case Verb::complete:
    case Verb::step:
    case Verb::check: return;
    case Verb::flush: finished_.clear(); return;
    default: promise_ends_ = true; return;
  }
}

void ClosedSubject::follow(const Operation& operation, const Reply& reply) {
  switch (operation.verb) {
    case Verb::admit: {
      end(operation.id);  // a child that runs alone may admit an id twice
      const std::int64_t cached =
          std::min<std::int64_t>(reply.get(ReplyField::cached), operation.tokens.size());
      Content prompt = content_of(operation);
      requests_[operation.id.index()] = {.known = std::move(prompt.tokens),
                                         .space = prompt.space,
                                         .computed = cached,
                                         .asked = cached,
                                         .hit = cached};
      return;
    }
    case Verb::insert: computed_.insert(operation.tokens, operation.salt); return;
    case Verb::lock: ++locks_; return;
    case Verb::unlock: --locks_; return;
    case Verb::flush:
      if (requests_.empty() && locks_ == 0 && !has_disk(config_)) computed_ = PrefixTrie();
      return;
    default: break;
  }
  const auto found = requests_.find(operation.id.index());
  if (found == requests_.end()) return;
  follow_sequence(operation, reply, found->second);
  follow_request(operation, reply, found->second);
  if (operation.verb == Verb::finish || operation.verb == Verb::abort ||
      operation.verb == Verb::preempt)
    end(operation.id);
}

void ClosedSubject::end(Name id) {
  const auto found = requests_.find(id.index());
  if (found == requests_.end()) return;
  keep(found->second);
  requests_.erase(found);
}

/// The computed tokens of a request may stay in the cache, however the request ends.
void ClosedSubject::keep(const Request& request) {
  if (request.computed > 0)
    computed_.insert(request.known.prefix(static_cast<std::uint32_t>(request.computed)),
                     request.space);
}

void ClosedSubject::follow_sequence(const Operation& operation, const Reply& reply,
                                    Request& request) {
  const auto first = [&](const Request& of, std::int64_t size) {
    const std::int64_t length = size == Operation::kAbsent ? of.computed : size;
    Request shorter{.known = of.known, .space = of.space};
    shorter.computed = shorter.asked = std::clamp<std::int64_t>(length, 0, of.computed);
    shorter.hit = std::min(of.hit, shorter.computed);
    shorter.known = of.known.prefix(static_cast<std::uint32_t>(shorter.computed));
    return shorter;
  };
  switch (operation.verb) {
    case Verb::clone:
      requests_.insert_or_assign(operation.as.index(), first(request, operation.up_to));
      return;
    case Verb::truncate:
      keep(request);
      request = first(request, operation.up_to);
      return;
    case Verb::capture:
      captured_.insert_or_assign(
          operation.as.index(),
          Content{request.known.prefix(static_cast<std::uint32_t>(request.computed)),
                  request.space});
      return;
    case Verb::restore:
      if (const auto kept = captured_.find(operation.from.index()); kept != captured_.end()) {
        keep(request);
        const std::int64_t size = kept->second.tokens.size();
        // A slot cache says how much of the prompt is there now; the rest of the prompt is still to
        // be computed. A sequence engine answers nothing, and the sequence ends there.
        const bool goes_on = reply.has(ReplyField::cached) && request.known.size() > size;
        request = {.known = goes_on ? request.known : kept->second.tokens,
                   .space = kept->second.space,
                   .computed = size,
                   .asked = size};
      }
      return;
    default: return;
  }
}

void ClosedSubject::follow_request(const Operation& operation, const Reply& reply,
                                   Request& request) {
  if (operation.verb != Verb::extend && operation.verb != Verb::accept) return;
  request.known.append(operation.tokens);
  const std::int64_t known = request.known.size();
  if (operation.verb == Verb::accept) {
    // Kept drafts are computed. The token after them is only sampled.
    if (request.verifies && request.unanswered == 0)
      request.computed = request.asked = std::max(request.computed, known - 1);
    request.verifies = false;
    return;
  }
  const std::int64_t n = reply.get(ReplyField::n);
  // A child may leave out drafts that only fill up the row of an admission: it answers n=1.
  request.verifies = !operation.drafts.empty() && (n != 1 || operation.n == 1);
  if (request.verifies) {
    // Drafts count as computed only once an `accept` says which of them are kept.
    request.unanswered = operation.n - n;
    if (request.unanswered == 0) request.computed = request.asked = known;
    return;
  }
  request.computed = std::min(known, request.computed + n);
  request.asked = std::min(known, request.asked + operation.n);
}

const ClosedSubject::Request* ClosedSubject::find(Name id) const {
  const auto found = requests_.find(id.index());
  return found == requests_.end() ? nullptr : &found->second;
}

}  // namespace lockstep::cache_sim
