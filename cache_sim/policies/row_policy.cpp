#include "cache_sim/policies/row_policy.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "cache_sim/policies/request_checks.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/mark.hpp"

namespace lockstep::cache_sim {

RowPolicy::Sizes RowPolicy::sizes_of(const Config& config) {
  return {.rows = static_cast<std::uint32_t>(config.rows()),
          .positions = static_cast<std::uint32_t>(config.kv_tokens / config.rows()),
          .captures = static_cast<std::uint32_t>(config.state_slots)};
}

Result<void> RowPolicy::check_sizes(const Config& config) {
  if (config.kv_tokens >= config.rows()) return {};
  return fail(fmt::format("field kv_tokens: {} is less than one token for each of {}",
                          config.kv_tokens, counted(config.rows(), "row")));
}

RowPolicy::RowPolicy(const SubjectOptions& options, bool has_states, std::uint32_t verified_most)
    : layers_(*options.layers),
      sizes_(sizes_of(options.config)),
      has_states_(has_states),
      verified_most_(verified_most) {}

Result<Reply> RowPolicy::apply(const Operation& operation) {
  switch (operation.verb) {
    case Verb::admit: return admit(operation);
    case Verb::compact: return compact(operation);
    case Verb::step:
      begin_step();
      layers_.launch({});
      return Reply{};
    case Verb::evict:
      if (operation.room != Operation::kAbsent) return fail("evict: rows keep no room for others");
      [[fallthrough]];
    case Verb::flush: return Reply{}.set(ReplyField::kv, 0).set(ReplyField::state, 0);
    case Verb::check: return check();
    case Verb::extend:
    case Verb::accept:
    case Verb::checkpoint:
    case Verb::finish:
    case Verb::abort:
    case Verb::preempt:
    case Verb::capture:
    case Verb::restore: break;
    default: return fail(fmt::format("{} is not an operation of rows", to_string(operation.verb)));
  }
  RowRequest* const request = find(operation.id);
  if (request == nullptr) return no_such_request(operation);
  if (discards(operation)) {
    end(*request);
    return Reply{};
  }
  if (operation.verb == Verb::accept) return accept(*request, operation);
  const bool is_verifying = !request->drafts.empty();
  if (const Result<void> settled = check_is_settled(operation, is_verifying); !settled)
    return tl::unexpected(settled.error());
  switch (operation.verb) {
    case Verb::extend: return extend(*request, operation);
    case Verb::capture: return capture(*request, operation);
    case Verb::restore: return restore(*request, operation);
    case Verb::finish: end(*request); break;
    default:
      if (operation.up_to > request->computed)
        return fail(fmt::format("checkpoint: up_to={} is beyond the {}", operation.up_to,
                                counted(request->computed, "computed token")));
  }
  return Reply{}.set(ReplyField::exist, 0).set(ReplyField::length, 0);  // nothing stays
}

RowRequest* RowPolicy::find(Name id) {
  const auto found = std::ranges::find(requests_, id, &RowRequest::id);
  return found == requests_.end() ? nullptr : &*found;
}

std::uint32_t RowPolicy::row_of(const RowRequest& request) const {
  return static_cast<std::uint32_t>(std::ranges::find(rows_, request.id) - rows_.begin());
}

// --- Requests ------------------------------------------------------------------------------------

Result<Reply> RowPolicy::admit(const Operation& operation) {
  const bool is_admitted = find(operation.id) != nullptr;
  if (const Result<void> sound = check_admission(operation, is_admitted); !sound)
    return tl::unexpected(sound.error());
  if (operation.external > 0 || operation.room != Operation::kAbsent)
    return fail("admit: rows take no external tokens and keep no room");
  if (operation.tokens.size() > sizes_.positions) return Reply::refusal(Refusal::too_long);
  const auto hole = std::ranges::find_if(rows_, [](Name id) { return !id.exists(); });
  const auto row = static_cast<std::uint32_t>(hole - rows_.begin());
  if (row == sizes_.rows) return Reply::refusal(Refusal::no_row);
  if (row == rows_.size()) {
    rows_.emplace_back();
    lengths_.push_back(0);
  } else {
    LOCKSTEP_MARK("rows.fills_hole");
  }
  rows_[row] = operation.id;
  requests_.push_back({operation.id, operation.salt, operation.tokens, 0, {}, 0});
  return begin_row(row);
}

Result<Reply> RowPolicy::extend(RowRequest& request, const Operation& operation) {
  if (operation.async) return fail("extend: rows do not run ahead of results");
  const std::int64_t drafts = operation.drafts.size();
  const std::int64_t left =
      std::int64_t{request.known.size()} + operation.tokens.size() - request.computed + drafts;
  if (const Result<void> fits = check_extend(operation, left); !fits)
    return tl::unexpected(fits.error());
  if (drafts != 0 && left == drafts)
    return fail(
        fmt::format("extend: drafts follow a token that is not computed, and request `{}` "
                    "has none",
                    operation.id.text()));
  if (drafts != 0 && operation.n > verified_most_) return Reply::refusal(Refusal::too_long);
  if (request.computed + operation.n > sizes_.positions) return Reply::refusal(Refusal::no_kv);
  request.known.append(operation.tokens);
  const auto n = static_cast<std::uint32_t>(operation.n);
  run(row_of(request), request.known.followed_by(operation.drafts), n, operation.drafts.size());
  if (drafts == 0) {
    request.computed += n;
  } else {
    request.drafts = operation.drafts;
    request.verified = n;
  }
  return Reply{}.set(ReplyField::n, operation.n);
}

Result<Reply> RowPolicy::accept(RowRequest& request, const Operation& operation) {
  if (const Result<void> sound = check_accept(operation); !sound)
    return tl::unexpected(sound.error());
  const bool verified = !request.drafts.empty();
  if (verified)
    if (const Result<void> kept = check_kept(operation, request.drafts); !kept)
      return tl::unexpected(kept.error());
  request.known.append(operation.tokens);
  if (verified) {
    const std::uint32_t accepted = request.known.size() - 1 - request.computed;
    keep(request, row_of(request), accepted);
    request.computed += accepted;
    request.drafts = Tokens();
  }
  return Reply{}.set(ReplyField::n, operation.n);
}

void RowPolicy::end(const RowRequest& request) {
  const std::uint32_t row = row_of(request);
  end_row(row);
  rows_[row] = {};
  requests_.erase(requests_.begin() + (&request - requests_.data()));
}

// --- Captured prefixes ---------------------------------------------------------------------------

Result<Reply> RowPolicy::capture(const RowRequest& request, const Operation& operation) {
  if (request.computed == 0) return fail("capture: nothing is computed");
  auto found = std::ranges::find(captured_, operation.as, &CapturedPrefix::name);
  if (found == captured_.end()) {
    if (captured_.size() == sizes_.captures) return Reply::refusal(Refusal::no_state_slot);
    found = captured_.insert(captured_.end(), CapturedPrefix{});
  }
  *found = {operation.as, request.salt, request.known.prefix(request.computed)};
  save(row_of(request), static_cast<std::uint32_t>(found - captured_.begin()), request.computed);
  return Reply{}.set(ReplyField::length, request.computed);
}

Result<Reply> RowPolicy::restore(RowRequest& request, const Operation& operation) {
  const auto found = std::ranges::find(captured_, operation.from, &CapturedPrefix::name);
  if (found == captured_.end())
    return fail(fmt::format("restore: nothing was captured as `{}`", operation.from.text()));
  const std::uint32_t size = found->tokens.size();
  if (request.computed > 0 || request.salt != found->salt || request.known.size() <= size ||
      request.known.prefix(size) != found->tokens)
    return fail("restore: not the beginning of a request that has computed nothing");
  request.computed = size;
  return load(static_cast<std::uint32_t>(found - captured_.begin()), row_of(request), size);
}

// --- Rows ----------------------------------------------------------------------------------------

Result<Reply> RowPolicy::compact(const Operation& operation) {
  const std::vector<std::int64_t>& mapping = operation.mapping;
  std::vector<RowUse> uses;
  for (const Name id : rows_)
    uses.push_back(!id.exists()               ? RowUse::hole
                   : find(id)->drafts.empty() ? RowUse::settled
                                              : RowUse::verifying);
  const Result<std::uint32_t> kept = check_mapping(mapping, uses);
  if (!kept) return tl::unexpected(kept.error());
  std::vector<Name> rows(*kept);
  for (std::size_t i = 0; i < mapping.size(); ++i)
    if (mapping[i] >= 0) rows[static_cast<std::size_t>(mapping[i])] = rows_[i];
  lengths_ = reorder(mapping, *kept);
  rows_.swap(rows);
  return Reply{};
}

Reply RowPolicy::check() const {
  std::int64_t used = 0;
  for (const RowRequest& request : requests_) used += request.computed;
  const auto running = static_cast<std::int64_t>(requests_.size());
  Reply reply;
  reply.set(ReplyField::kv_free, std::int64_t{sizes_.positions} * sizes_.rows - used)
      .set(ReplyField::kv_locked, used);
  if (has_states_)
    reply.set(ReplyField::states_free, sizes_.rows - running)
        .set(ReplyField::states_locked, running);
  return reply;
}

std::optional<Snapshot> RowPolicy::snapshot() const {
  Snapshot content;
  content.kv_total = content.kv_free = std::int64_t{sizes_.positions} * sizes_.rows;
  const auto show = [&](const Tokens& tokens, bool runs) {
    content.nodes.push_back({-1, tokens.text(40), tokens.size(), has_states_, runs});
  };
  for (const RowRequest& request : requests_) {
    show(request.known.prefix(request.computed), true);
    content.kv_free -= request.computed;
  }
  for (const CapturedPrefix& captured : captured_) show(captured.tokens, false);
  if (has_states_) {
    content.states_total = sizes_.rows + sizes_.captures;
    content.states_free = content.states_total - static_cast<std::int64_t>(content.nodes.size());
  }
  return content;
}

}  // namespace lockstep::cache_sim
