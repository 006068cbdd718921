// The cache of a model exported with fixed shapes: the subject that follows its rules
// (static_kv.md) literally. The places of keys and values, and the calls that write them, change no
// answer.
#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "reference/protocol/subject.hpp"

namespace lockstep::reference {
namespace {

/// Texts as plain lists of tokens.
using Text = std::vector<Token>;

bool begins_with(const Text& text, const Text& beginning) {
  return text.size() >= beginning.size() &&
         std::equal(beginning.begin(), beginning.end(), text.begin());
}

class StaticKvOracle final : public Subject {
 public:
  explicit StaticKvOracle(const Config& config)
      : positions_(config.kv_tokens / config.rows()),
        row_count_(config.rows()),
        places_(config.state_slots) {}

  Result<Reply> apply(const Operation& operation) override {
    switch (operation.verb) {
      case Verb::admit: return admit(operation);
      case Verb::compact: return compact(operation);
      case Verb::step: return Reply{};
      case Verb::check: return check();
      case Verb::evict:
      case Verb::flush:
        if (operation.verb == Verb::evict && operation.room != Operation::kAbsent)
          return fail("evict: there is no room= here");
        return Reply().set(ReplyField::kv, 0).set(ReplyField::state, 0);
      case Verb::complete: return fail("complete: nothing is asynchronous here");
      default:
        if (capability_of(operation.verb) == Capability::tree) return fail("not a verb of rows");
        return of_request(operation);
    }
  }

 private:
  struct Row {
    std::string id, salt;
    Text known;
    std::size_t computed = 0;
    Text drafts;
  };
  struct Captured {
    std::string salt;
    Text text;
  };

  /// The row of a request, or null.
  std::optional<Row>* row_of(const std::string& id) {
    for (std::optional<Row>& row : rows_)
      if (row && row->id == id) return &row;
    return nullptr;
  }

  static Reply nothing_kept() {
    return Reply().set(ReplyField::exist, 0).set(ReplyField::length, 0);
  }

  Result<Reply> of_request(const Operation& operation) {
    std::optional<Row>* const row = row_of(std::string(operation.id.text()));
    if (row == nullptr) return fail("there is no such request");
    switch (operation.verb) {
      case Verb::abort:
      case Verb::preempt: row->reset(); return Reply{};
      case Verb::finish:
        if (!operation.insert) {
          row->reset();
          return Reply{};
        }
        if (!(*row)->drafts.empty()) break;
        row->reset();
        return nothing_kept();
      case Verb::accept: return accept(**row, operation);
      default: break;
    }
    if (!(*row)->drafts.empty()) return fail("a verification was not accepted yet");
    switch (operation.verb) {
      case Verb::extend: return extend(**row, operation);
      case Verb::capture: return capture(**row, operation);
      case Verb::restore: return restore(**row, operation);
      default: break;
    }
    if (operation.up_to > std::ssize((*row)->known) ||
        operation.up_to > static_cast<std::int64_t>((*row)->computed))
      return fail("checkpoint: not computed yet");
    return nothing_kept();
  }

  Result<Reply> admit(const Operation& operation) {
    if (row_of(std::string(operation.id.text())) != nullptr)
      return fail("there is such a request already");
    const Text tokens = operation.tokens.values();
    if (tokens.empty() || operation.prompt > std::ssize(tokens))
      return fail("admit: no tokens, or a prompt longer than they are");
    if (operation.external > 0 || operation.room != Operation::kAbsent)
      return fail("admit: no external tokens and no room= here");
    if (std::ssize(tokens) > positions_) return Reply::refusal(Refusal::too_long);
    auto free = std::find(rows_.begin(), rows_.end(), std::nullopt);
    if (free == rows_.end() && std::ssize(rows_) == row_count_)
      return Reply::refusal(Refusal::no_row);
    if (free == rows_.end()) free = rows_.insert(free, std::nullopt);
    *free =
        Row{std::string(operation.id.text()), std::string(operation.salt.text()), tokens, 0, {}};
    return Reply().set(ReplyField::cached, 0);
  }

  Result<Reply> extend(Row& row, const Operation& operation) {
    if (operation.async) return fail("extend: nothing is asynchronous here");
    Text text = row.known;
    for (const Token token : operation.tokens.values()) text.push_back(token);
    const Text drafts = operation.drafts.values();
    const auto left = static_cast<std::int64_t>(text.size() + drafts.size() - row.computed);
    if (operation.n < 1 || operation.n > left) return fail("extend: so many tokens are not left");
    if (!drafts.empty() && operation.n != left) return fail("extend: drafts are verified at once");
    if (!drafts.empty() && text.size() == row.computed)
      return fail("extend: drafts need a token before them whose answer they guess");
    if (static_cast<std::int64_t>(row.computed) + operation.n > positions_)
      return Reply::refusal(Refusal::no_kv);
    row.known = text;
    row.drafts = drafts;
    if (drafts.empty()) row.computed += static_cast<std::size_t>(operation.n);
    return Reply().set(ReplyField::n, operation.n);
  }

  static Result<Reply> accept(Row& row, const Operation& operation) {
    const Text kept = operation.tokens.values();
    if (operation.n != std::ssize(kept)) return fail("accept: n is not the number of tokens");
    if (!row.drafts.empty()) {
      if (kept.empty() || !begins_with(row.drafts, {kept.begin(), kept.end() - 1}))
        return fail("accept: the tokens kept are drafts and one more");
      row.computed = row.known.size() + kept.size() - 1;
    }
    row.known.insert(row.known.end(), kept.begin(), kept.end());
    row.drafts.clear();
    return Reply().set(ReplyField::n, operation.n);
  }

  Result<Reply> capture(const Row& row, const Operation& operation) {
    if (row.computed == 0) return fail("capture: nothing is computed");
    const std::string name(operation.as.text());
    if (!captured_.contains(name) && std::ssize(captured_) == places_)
      return Reply::refusal(Refusal::no_state_slot);
    const auto end = row.known.begin() + static_cast<std::ptrdiff_t>(row.computed);
    captured_[name] = {row.salt, {row.known.begin(), end}};
    return Reply().set(ReplyField::length, static_cast<std::int64_t>(row.computed));
  }

  Result<Reply> restore(Row& row, const Operation& operation) {
    const auto found = captured_.find(std::string(operation.from.text()));
    if (found == captured_.end()) return fail("restore: nothing was captured under that name");
    const Captured& captured = found->second;
    if (row.computed > 0 || row.salt != captured.salt || row.known.size() == captured.text.size() ||
        !begins_with(row.known, captured.text))
      return fail("restore: not the beginning of a request that has computed nothing");
    row.computed = captured.text.size();
    return Reply().set(ReplyField::cached, static_cast<std::int64_t>(row.computed));
  }

  Result<Reply> compact(const Operation& operation) {
    if (operation.mapping.size() != rows_.size()) return fail("compact: a number for each row");
    std::map<std::int64_t, Row> placed;
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      const std::int64_t number = operation.mapping[i];
      if (rows_[i].has_value() != (number >= 0) || number < -1)
        return fail("compact: -1 is for holes, and for nothing else");
      if (!rows_[i]) continue;
      if (!rows_[i]->drafts.empty()) return fail("compact: a row verifies drafts");
      if (!placed.emplace(number, *rows_[i]).second) return fail("compact: a number twice");
    }
    if (!placed.empty() && placed.rbegin()->first >= std::ssize(placed))
      return fail("compact: the numbers leave a hole");
    rows_.clear();
    for (const auto& [number, row] : placed) rows_.emplace_back(row);
    return Reply{};
  }

  Reply check() const {
    std::int64_t used = 0;
    for (const std::optional<Row>& row : rows_)
      if (row) used += static_cast<std::int64_t>(row->computed);
    return Reply()
        .set(ReplyField::kv_free, positions_ * row_count_ - used)
        .set(ReplyField::kv_locked, used);
  }

  const std::int64_t positions_, row_count_, places_;
  std::vector<std::optional<Row>> rows_;
  std::map<std::string, Captured> captured_;
};

const Registration<OracleEntry> kStaticKvOracle{
    {"static-kv", [](const SubjectOptions& options) -> std::unique_ptr<Subject> {
       return std::make_unique<StaticKvOracle>(options.config);
     }}};

}  // namespace
}  // namespace lockstep::reference
