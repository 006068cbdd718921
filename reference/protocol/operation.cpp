#include "reference/protocol/operation.hpp"
#include "reference/protocol/near_word.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <variant>

#include "reference/base/overloaded.hpp"
#include "reference/base/require.hpp"
#include "reference/protocol/config.hpp"
#include "reference/protocol/vocabulary.hpp"

namespace lockstep {
namespace {

constexpr std::size_t kShown = 60;       // characters of a value that an error shows
constexpr std::size_t kMostFields = 64;  // more than any verb or reply has

struct NumberField {
  static constexpr std::string_view kName = "number";
  std::int64_t Operation::*member;
  std::int64_t low = 0;
};
struct FlagField {
  static constexpr std::string_view kName = "flag";
  bool Operation::*member;
};
struct NameField {
  static constexpr std::string_view kName = "name";
  Name Operation::*member;
};
struct TokensField {
  static constexpr std::string_view kName = "tokens";
  Tokens Operation::*member;
};
struct NamesField {
  static constexpr std::string_view kName = "names";
  std::vector<Name> Operation::*member;
};
struct ImagesField {
  static constexpr std::string_view kName = "images";
  std::vector<ImageSpan> Operation::*member;
};
struct NumbersField {
  static constexpr std::string_view kName = "numbers";
  std::vector<std::int64_t> Operation::*member;
};

struct FieldRow {
  std::string_view name;
  std::variant<NumberField, FlagField, NameField, TokensField, NamesField, ImagesField,
               NumbersField>
      kind;
  bool required = false;
  Capability needs = Capability::request;
};

// One row per field, sorted by name within a verb: the order of printing.
constexpr FieldRow kId{"id", NameField{&Operation::id}, true};
constexpr FieldRow kSalt{"salt", NameField{&Operation::salt}};
constexpr FieldRow kTokens{"tokens", TokensField{&Operation::tokens}, true};
constexpr FieldRow kSlot{"slot", NameField{&Operation::slot}, true};
constexpr FieldRow kAs{"as", NameField{&Operation::as}, true};
constexpr FieldRow kFrom{"from", NameField{&Operation::from}, true};

constexpr FieldRow kAdmit[] = {
    {.name = "external", .kind = NumberField{&Operation::external}, .needs = Capability::transfers},
    kId,
    {.name = "images", .kind = ImagesField{&Operation::images}, .needs = Capability::content_keys},
    {"late", FlagField{&Operation::late}},
    {.name = "lora", .kind = NameField{&Operation::lora}, .needs = Capability::content_keys},
    {"prompt", NumberField{&Operation::prompt}},
    {"room", NumberField{&Operation::room}},
    kSalt,
    kTokens};
constexpr FieldRow kExtend[] = {{"async", FlagField{&Operation::async}},
                                {"drafts", TokensField{&Operation::drafts}},
                                kId,
                                {"n", NumberField{&Operation::n, 1}, true},
                                {.name = "parents",
                                 .kind = NumbersField{&Operation::parents},
                                 .needs = Capability::draft_trees},
                                {"tokens", TokensField{&Operation::tokens}}};
constexpr FieldRow kAccept[] = {
    kId, {"n", NumberField{&Operation::n, 0}, true}, {"tokens", TokensField{&Operation::tokens}}};
constexpr FieldRow kCheckpoint[] = {kId, {"up_to", NumberField{&Operation::up_to}}};
constexpr FieldRow kFinish[] = {kId,
                                {"insert", FlagField{&Operation::insert}},
                                {.name = "up_to",
                                 .kind = NumberField{&Operation::up_to, 1},
                                 .needs = Capability::partial_finish}};
constexpr FieldRow kOnlyId[] = {kId};
constexpr FieldRow kStep[] = {{"ids", NamesField{&Operation::ids}},
                              {"padded", NumberField{&Operation::padded}}};
constexpr FieldRow kCapture[] = {kAs, kId, {"partial", FlagField{&Operation::partial}}};
constexpr FieldRow kRestore[] = {kFrom, kId};
constexpr FieldRow kCompact[] = {{"mapping", NumbersField{&Operation::mapping}, true}};
constexpr FieldRow kEvict[] = {
    {"kv", NumberField{&Operation::kv}},
    {"room", NumberField{&Operation::room}},
    {"state", NumberField{&Operation::state}},
    {.name = "tier", .kind = NameField{&Operation::tier}, .needs = Capability::tiers}};
constexpr FieldRow kMatch[] = {{"limit", NumberField{&Operation::limit}}, kSalt, kTokens};
constexpr FieldRow kAlloc[] = {kAs, {"tokens", TokensField{&Operation::tokens}}};
constexpr FieldRow kAdvance[] = {kSlot, kTokens};
constexpr FieldRow kFork[] = {kAs, kSlot};
constexpr FieldRow kCopy[] = {kFrom, {"to", NameField{&Operation::to}, true}};
constexpr FieldRow kInsert[] = {
    {"prev", NumberField{&Operation::prev}}, kSalt, {"slot", NameField{&Operation::slot}}, kTokens};
constexpr FieldRow kLock[] = {kAs, kSalt, kTokens};
constexpr FieldRow kUnlock[] = {{"lock", NameField{&Operation::lock}, true}};
constexpr FieldRow kFree[] = {kSlot};
constexpr FieldRow kClone[] = {kAs, kId, {"up_to", NumberField{&Operation::up_to}}};
constexpr FieldRow kTruncate[] = {kId, {"up_to", NumberField{&Operation::up_to}, true}};
constexpr FieldRow kMoved{
    .name = "id", .kind = NameField{&Operation::id}, .needs = Capability::disaggregation};
constexpr FieldRow kTier{"tier", NameField{&Operation::tier}, true};
constexpr FieldRow kLand[] = {{"from", NameField{&Operation::from}}, kMoved, kTier};
constexpr FieldRow kFail[] = {
    {"from", NameField{&Operation::from}}, kMoved, {"rank", NumberField{&Operation::rank}}, kTier};

struct VerbRow {
  std::string_view name;
  std::span<const FieldRow> fields;
  /// The fields of an answer besides those about evictions. The first ones are required unless the
  /// answer is a refusal.
  std::span<const ReplyField> reply = {};
  std::size_t must = 0;
  Capability needs = Capability::request;
};

constexpr ReplyField kAdmitReply[] = {ReplyField::cached,   ReplyField::state, ReplyField::conv,
                                      ReplyField::junction, ReplyField::kv,    ReplyField::host};
constexpr ReplyField kExtendReply[] = {ReplyField::n, ReplyField::blocks, ReplyField::output};
constexpr ReplyField kAcceptReply[] = {ReplyField::n};
constexpr ReplyField kStoredReply[] = {ReplyField::exist, ReplyField::length};
constexpr ReplyField kEvictReply[] = {ReplyField::kv, ReplyField::state, ReplyField::kv_free};
constexpr ReplyField kCheckReply[] = {ReplyField::violations,    ReplyField::kv_free,
                                      ReplyField::states_free,   ReplyField::kv_locked,
                                      ReplyField::states_locked, ReplyField::contents,
                                      ReplyField::host_kv_free,  ReplyField::host_states_free,
                                      ReplyField::window_free,   ReplyField::window_locked};
constexpr ReplyField kMatchReply[] = {ReplyField::kv, ReplyField::state, ReplyField::branch,
                                      ReplyField::host, ReplyField::cached};
constexpr ReplyField kSlotReply[] = {ReplyField::slot, ReplyField::length};
constexpr ReplyField kCaptureReply[] = {ReplyField::length};
constexpr ReplyField kInsertReply[] = {ReplyField::exist, ReplyField::freed_kv};
constexpr ReplyField kCopiesReply[] = {ReplyField::n};
constexpr ReplyField kLoadReply[] = {ReplyField::kv, ReplyField::state};

// Indexed by Verb.
constexpr VerbRow kVerbs[] = {
    {"admit", kAdmit, kAdmitReply, 1},
    {"extend", kExtend, kExtendReply, 1},
    {"accept", kAccept, kAcceptReply},
    {"checkpoint", kCheckpoint, kStoredReply},
    {"finish", kFinish, kStoredReply},
    {"abort", kOnlyId},
    {"preempt", kOnlyId},
    {"step", kStep},
    {"complete", kOnlyId},
    {"capture", kCapture, kCaptureReply, 0, Capability::slots},
    {"restore", kRestore, kAdmitReply, 0, Capability::slots},
    {"compact", kCompact, {}, 0, Capability::slots},
    {"evict", kEvict, kEvictReply},
    {"flush", {}, kEvictReply},
    {"check", {}, kCheckReply},
    {"match", kMatch, kMatchReply, 1, Capability::tree},
    {"alloc", kAlloc, kSlotReply, 0, Capability::tree},
    {"advance", kAdvance, kSlotReply, 0, Capability::tree},
    {"fork", kFork, kSlotReply, 0, Capability::tree},
    {"copy", kCopy, kSlotReply, 0, Capability::tree},
    {"insert", kInsert, kInsertReply, 1, Capability::tree},
    {"lock", kLock, {}, 0, Capability::tree},
    {"unlock", kUnlock, {}, 0, Capability::tree},
    {"free", kFree, {}, 0, Capability::tree},
    {"clone", kClone, {}, 0, Capability::sequences},
    {"truncate", kTruncate, {}, 0, Capability::sequences},
    {"land", kLand, kCopiesReply, 0, Capability::tiers},
    {"settle", {}, kCopiesReply, 0, Capability::tiers},
    {"fail", kFail, kCopiesReply, 0, Capability::tiers},
    {"load", kOnlyId, kLoadReply, 0, Capability::disaggregation},
};
static_assert(std::size(kVerbs) == kVerbCount);

/// By verb, those of its fields that need more than the request verbs do.
struct FieldsWithNeeds {
  std::array<const FieldRow*, 3> rows{};
  std::size_t count = 0;
};
constexpr std::array<FieldsWithNeeds, kVerbCount> kFieldsWithNeeds = [] {
  std::array<FieldsWithNeeds, kVerbCount> fields;
  for (std::size_t verb = 0; verb < kVerbCount; ++verb)
    for (const FieldRow& field : kVerbs[verb].fields)
      if (field.needs != Capability::request) fields[verb].rows.at(fields[verb].count++) = &field;
  return fields;
}();

/// Words that begin a line of a trace and are no operations.
constexpr std::string_view kOtherVerbs[] = {"close",   "config",  "expect",
                                            "request", "retract", "run"};

constexpr std::string_view kReplyFields[] = {"branch",
                                             "cached",
                                             "conv",
                                             "evicted_kv",
                                             "evicted_states",
                                             "exist",
                                             "finish",
                                             "finished",
                                             "freed_kv",
                                             "junction",
                                             "kv",
                                             "kv_free",
                                             "kv_locked",
                                             "length",
                                             "n",
                                             "output_tokens",
                                             "slot",
                                             "state",
                                             "states",
                                             "states_free",
                                             "states_locked",
                                             "time",
                                             "violations",
                                             "blocks",
                                             "output",
                                             "contents",
                                             "host",
                                             "host_kv_free",
                                             "host_states_free",
                                             "window_free",
                                             "window_locked"};
static_assert(std::size(kReplyFields) == kReplyFieldCount);

/// The fields in the order of their names.
constexpr std::array<ReplyField, kReplyFieldCount> kPrinted = [] {
  std::array<ReplyField, kReplyFieldCount> sorted{};
  for (std::size_t i = 0; i < kReplyFieldCount; ++i) sorted[i] = static_cast<ReplyField>(i);
  std::ranges::sort(sorted, [](ReplyField a, ReplyField b) {
    return kReplyFields[static_cast<std::size_t>(a)] < kReplyFields[static_cast<std::size_t>(b)];
  });
  return sorted;
}();

constexpr std::string_view kRefusals[] = {"none",      "no_kv",    "no_state_slot", "no_row",
                                          "same_step", "too_long", "unsupported"};
constexpr std::string_view kFinishReasons[] = {"running", "stop", "length", "abort", "refused"};

/// Calls `use` with each comma-separated piece; stops at the first error.
template <class Use>
Result<void> each_piece(std::string_view list, Use use) {
  for (;;) {
    const std::size_t comma = std::min(list.find(','), list.size());
    if (Result<void> used = use(list.substr(0, comma)); !used) return used;
    if (comma == list.size()) return {};
    list.remove_prefix(comma + 1);
  }
}

Result<void> set_field(Operation& operation, const FieldRow& row, std::string_view value) {
  return std::visit(
      Overloaded{[&](const NumberField& f) -> Result<void> {
                   return parse_integer(value, f.low, kMostInteger).map([&](std::int64_t v) {
                     operation.*f.member = v;
                   });
                 },
                 [&](const FlagField& f) -> Result<void> {
                   return parse_integer(value, 0, 1).map([&](std::int64_t v) {
                     operation.*f.member = v != 0;
                   });
                 },
                 [&](const NameField& f) -> Result<void> {
                   if (value.empty()) return fail("is empty");
                   operation.*f.member = Name::intern(value);
                   return {};
                 },
                 [&](const TokensField& f) -> Result<void> {
                   return parse_tokens(value).map(
                       [&](const Tokens& t) { operation.*f.member = t; });
                 },
                 [&](const NamesField& f) -> Result<void> {
                   return each_piece(value, [&](std::string_view piece) -> Result<void> {
                     if (piece.empty()) return fail("has an empty name in its list");
                     (operation.*f.member).push_back(Name::intern(piece));
                     return {};
                   });
                 },
                 [&](const ImagesField& f) -> Result<void> {
                   const Result<std::vector<ImageSpan>> images = parse_images(value);
                   if (!images) return tl::unexpected(images.error());
                   for (const ImageSpan& image : *images)
                     if (!image.name.exists()) return fail("an image is OFFSET:LENGTH:NAME");
                   operation.*f.member = *images;
                   return {};
                 },
                 [&](const NumbersField& f) -> Result<void> {
                   return each_piece(value, [&](std::string_view piece) -> Result<void> {
                     return parse_integer(piece, -1, kMostInteger).map([&](std::int64_t v) {
                       (operation.*f.member).push_back(v);
                     });
                   });
                 }},
      row.kind);
}

/// An operation that carries no field.
const Operation& nothing() {
  static const Operation operation;
  return operation;
}

/// The field's text, empty where it is absent (or has the value that absence means).
std::string field_text(const Operation& operation, const FieldRow& row, std::size_t limit) {
  return std::visit(
      Overloaded{[&](const NumberField& f) {
                   const std::int64_t value = operation.*f.member;
                   return value == Operation::kAbsent ? std::string() : std::to_string(value);
                 },
                 [&](const FlagField& f) {
                   const bool value = operation.*f.member;
                   return value == nothing().*f.member ? std::string()
                                                       : std::string(value ? "1" : "0");
                 },
                 [&](const NameField& f) { return (operation.*f.member).text(); },
                 [&](const TokensField& f) {
                   const Tokens& tokens = operation.*f.member;
                   return tokens.empty() && row.required ? "[]" : tokens.text(limit);
                 },
                 [&](const NamesField& f) {
                   std::string list;
                   for (const Name name : operation.*f.member)
                     list += (list.empty() ? "" : ",") + name.text();
                   return list;
                 },
                 [&](const ImagesField& f) { return images_text(operation.*f.member); },
                 [&](const NumbersField& f) {
                   std::string list;
                   for (const std::int64_t number : operation.*f.member)
                     list += (list.empty() ? "" : ",") + std::to_string(number);
                   return list;
                 }},
      row.kind);
}

/// Whether the operation carries the field, and with more than nothing: external=0 is no transfer.
bool asks_for(const Operation& operation, const FieldRow& row) {
  return std::visit(
      Overloaded{[&](const NumberField& f) { return operation.*f.member > 0; },
                 [&](const FlagField& f) { return operation.*f.member != nothing().*f.member; },
                 [&](const NameField& f) { return operation.*f.member != nothing().*f.member; },
                 [&](const auto& f) { return !(operation.*f.member).empty(); }},
      row.kind);
}

const VerbRow* find_verb(std::string_view name) {
  const auto* const found = std::ranges::find(kVerbs, name, &VerbRow::name);
  return found == std::end(kVerbs) ? nullptr : found;
}

template <std::size_t N>
std::optional<std::size_t> index_of(const std::string_view (&names)[N], std::string_view name) {
  for (std::size_t i = 0; i < N; ++i)
    if (names[i] == name) return i;
  return std::nullopt;
}

}  // namespace

std::string_view to_string(Verb verb) {
  return kVerbs[static_cast<std::size_t>(verb)].name;
}
Capability capability_of(Verb verb) {
  return kVerbs[static_cast<std::size_t>(verb)].needs;
}
bool is_operation_verb(std::string_view verb) {
  return find_verb(verb) != nullptr;
}
std::string_view to_string(ReplyField field) {
  return kReplyFields[static_cast<std::size_t>(field)];
}
std::string_view to_string(Refusal refusal) {
  return kRefusals[static_cast<std::size_t>(refusal)];
}
std::string_view to_string(FinishReason reason) {
  return kFinishReasons[static_cast<std::size_t>(reason)];
}

Result<std::vector<ImageSpan>> parse_images(std::string_view list) {
  std::vector<ImageSpan> images;
  std::int64_t end = 0;
  const Result<void> parsed = each_piece(list, [&](std::string_view piece) -> Result<void> {
    const std::string_view offset = piece.substr(0, piece.find(':'));
    std::string_view length = piece.substr(std::min(offset.size() + 1, piece.size()));
    const std::size_t colon = length.find(':');
    const std::string_view name = colon == std::string_view::npos ? "" : length.substr(colon + 1);
    length = length.substr(0, colon);
    const Result<std::int64_t> begin = parse_integer(offset, end, Tokens::kMaxSize);
    if (!begin) return fail("images do not follow one another: " + begin.error().text);
    const Result<std::int64_t> size = parse_integer(length, 1, Tokens::kMaxSize - *begin);
    if (!size) return fail("an image is OFFSET:LENGTH: " + size.error().text);
    if (colon != std::string_view::npos && name.empty()) return fail("an image's name is empty");
    images.push_back({static_cast<std::uint32_t>(*begin), static_cast<std::uint32_t>(*size),
                      name.empty() ? Name() : Name::intern(name)});
    end = images.back().end();
    return {};
  });
  if (!parsed) return tl::unexpected(parsed.error());
  return images;
}

std::string images_text(const std::vector<ImageSpan>& images) {
  std::string list;
  for (const ImageSpan& image : images)
    list += fmt::format("{}{}:{}{}{}", list.empty() ? "" : ",", image.begin, image.size,
                        image.name.exists() ? ":" : "", image.name.text());
  return list;
}

std::string Operation::text(std::size_t limit) const {
  const VerbRow& row = kVerbs[static_cast<std::size_t>(verb)];
  std::string line(row.name);
  for (const FieldRow& field : row.fields) {
    const std::string value = field_text(*this, field, limit);
    if (!value.empty()) line.append(" ").append(field.name).append("=").append(value);
  }
  return line;
}

std::optional<Lack> lack_for(const Operation& operation, Capabilities capabilities) {
  const auto verb = static_cast<std::size_t>(operation.verb);
  if (!capabilities.contains(kVerbs[verb].needs)) return Lack{.needs = kVerbs[verb].needs};
  const FieldsWithNeeds& fields = kFieldsWithNeeds[verb];
  for (const FieldRow* const field : std::span(fields.rows).first(fields.count))
    if (!capabilities.contains(field->needs) && asks_for(operation, *field))
      return Lack{"field ", field->name, field->needs};
  const bool is_load = operation.verb == Verb::extend && operation.n == 0;
  if (is_load && !capabilities.contains(Capability::transfers))
    return Lack{"", "n=0", Capability::transfers};
  return std::nullopt;
}

std::string Lack::text() const {
  if (what.empty()) return std::string(lack_of(needs));
  return fmt::format("takes no {}{}: it {}", kind, what, lack_of(needs));
}

std::string operation_form(const Operation& operation) {
  const VerbRow& row = kVerbs[static_cast<std::size_t>(operation.verb)];
  std::string form(row.name);
  for (const FieldRow& field : row.fields)
    if (!field.required && !field_text(operation, field, kShown).empty())
      form.append(" ").append(field.name);
  return form;
}

std::vector<FieldName> fields_of(Verb verb) {
  std::vector<FieldName> fields;
  for (const FieldRow& field : kVerbs[static_cast<std::size_t>(verb)].fields)
    fields.push_back({field.name, field.required,
                      std::visit([](const auto& kind) { return kind.kName; }, field.kind),
                      field.needs});
  return fields;
}

std::vector<FieldName> answer_fields_of(Verb verb) {
  const VerbRow& row = kVerbs[static_cast<std::size_t>(verb)];
  std::vector<FieldName> fields;
  for (const ReplyField field : row.reply)
    fields.push_back({to_string(field), fields.size() < row.must});
  return fields;
}

bool may_answer(Verb verb, ReplyField field) {
  if (field == ReplyField::evicted_kv || field == ReplyField::evicted_states) return true;
  const std::span<const ReplyField> known = kVerbs[static_cast<std::size_t>(verb)].reply;
  return std::ranges::find(known, field) != known.end();
}

bool Reply::operator==(const Reply& other) const {
  if (refused != other.refused || present_ != other.present_) return false;
  return !difference(other);
}

void Reply::throw_full() {
  throw ContractViolation("a reply has room for its fields");
}

/// Independent of the order in which the fields were set.
void Reply::add_to(Digest& digest) const {
  std::uint64_t all = std::uint64_t{present_} << 8 | static_cast<std::uint64_t>(refused);
  for (std::size_t i = 0; i < count_; ++i) {
    // Sampled tokens are compared but not part of the digest: where an output is given as a number,
    // its tokens depend on the request's name.
    if (field_at(i) == ReplyField::output) continue;
    all += mix64(static_cast<std::uint64_t>(values_[i]) ^ static_cast<std::uint64_t>(field_at(i))
                                                              << 56);
  }
  digest.add(all);
}

std::optional<Reply::Difference> Reply::difference(const Reply& other) const {
  if (refused != other.refused) {
    const auto name = [](const Reply& reply) {
      return reply.refused == Refusal::none ? reply.text() : std::string(to_string(reply.refused));
    };
    return Difference{"refused", name(*this), name(other)};
  }
  for (std::size_t i = 0; i < kReplyFieldCount; ++i) {
    const auto field = static_cast<ReplyField>(i);
    if (has(field) && other.has(field) && get(field) != other.get(field))
      return Difference{std::string(to_string(field)), value_text(field), other.value_text(field)};
  }
  return std::nullopt;
}

std::optional<Reply::Difference> Reply::exact_difference(const Reply& other) const {
  if (std::optional<Difference> different = difference(other)) return different;
  for (std::size_t i = 0; i < kReplyFieldCount; ++i) {
    const auto field = static_cast<ReplyField>(i);
    if (has(field) == other.has(field) || field == ReplyField::violations) continue;
    const auto text = [&](const Reply& reply) {
      return reply.has(field) ? reply.value_text(field) : std::string("nothing");
    };
    return Difference{std::string(to_string(field)), text(*this), text(other)};
  }
  return std::nullopt;
}

std::string Reply::value_text(ReplyField field) const {
  if (field == ReplyField::finish)
    return std::string(to_string(static_cast<FinishReason>(get(field))));
  return std::to_string(get(field));
}

std::string Reply::text() const {
  if (refused != Refusal::none) return fmt::format("refused={}", to_string(refused));
  std::string line;
  for (const ReplyField field : kPrinted) {
    if (!has(field)) continue;
    if (!line.empty()) line += ' ';
    line.append(to_string(field)).append("=").append(value_text(field));
  }
  return line.empty() ? "ok" : line;
}

std::optional<std::string_view> Line::find(std::string_view key) const {
  for (const auto& [name, value] : fields)
    if (name == key) return value;
  return std::nullopt;
}

Result<Line> parse_line(std::string_view text, bool has_verb) {
  Line line;
  for (std::size_t at = 0; at < text.size();) {
    if (text[at] == ' ' || text[at] == '\t') {
      ++at;
      continue;
    }
    std::size_t end = at;
    while (end < text.size() && text[end] != ' ' && text[end] != '\t') {
      const auto c = static_cast<unsigned char>(text[end]);
      if (c < 0x20 || c == 0x7F)
        return fail(
            fmt::format("column {}: the control character {} cannot stand here", end + 1, c));
      ++end;
    }
    const std::string_view word = text.substr(at, end - at);
    at = end;
    const std::size_t equals = word.find('=');
    if (has_verb && line.verb.empty()) {
      if (equals != std::string_view::npos)
        return fail(fmt::format("`{}` stands where a verb is due", word.substr(0, 60)));
      line.verb = word;
      continue;
    }
    if (equals == std::string_view::npos || equals == 0)
      return fail(fmt::format("`{}` is not a field key=value", word.substr(0, 60)));
    const std::string_view key = word.substr(0, equals);
    if (line.fields.size() == kMostFields)
      return fail(fmt::format("the line has more than {} fields", kMostFields));
    if (line.find(key)) return fail(fmt::format("field {} stands twice", key.substr(0, 60)));
    line.fields.emplace_back(key, word.substr(equals + 1));
  }
  return line;
}

Result<Operation> parse_operation(const Line& line) {
  const VerbRow* const row = find_verb(line.verb);
  if (row == nullptr) {
    std::vector<std::string_view> known = names_in(kVerbs);
    known.insert(known.end(), std::begin(kOtherVerbs), std::end(kOtherVerbs));
    return fail(
        fmt::format("unknown verb `{}`{}", line.verb.substr(0, 60), but_near(line.verb, known)));
  }
  Operation operation;
  operation.verb = static_cast<Verb>(row - std::begin(kVerbs));
  // n=0 is for requests that take places for another server's tokens and compute nothing.
  const bool is_load =
      operation.verb == Verb::extend && line.find("n") == "0" && line.find("async") == "1";
  for (const auto& [key, value] : line.fields) {
    const auto field = std::ranges::find(row->fields, key, &FieldRow::name);
    if (field == row->fields.end())
      return fail(fmt::format("{} has no field `{}`{}", row->name, key.substr(0, 60),
                              but_near(key, names_in(row->fields))));
    if (is_load && field->name == "n") {
      operation.n = 0;
      continue;
    }
    if (const Result<void> set = set_field(operation, *field, value); !set)
      return fail(fmt::format("field {}: {}", key, set.error().text));
  }
  for (const FieldRow& field : row->fields)
    if (field.required && !line.find(field.name))
      return fail(fmt::format("{} needs the field {}", row->name, field.name));
  return operation;
}

std::optional<ReplyField> reply_field_from(std::string_view name) {
  const auto index = index_of(kReplyFields, name);
  return index ? std::optional(static_cast<ReplyField>(*index)) : std::nullopt;
}

namespace {

std::vector<std::string_view> names_of(Verb verb) {
  std::vector<std::string_view> names;
  for (const ReplyField field : kPrinted)
    if (may_answer(verb, field)) names.push_back(to_string(field));
  return names;
}

}  // namespace

Result<Reply> parse_reply(std::string_view text, Verb verb,
                          std::span<const std::string_view> besides) {
  const Result<Line> line = parse_line(text == "ok" ? "" : text, false);
  if (!line) return tl::unexpected(line.error());
  Reply reply;
  for (const auto& [key, value] : line->fields) {
    if (key == "refused") {
      const auto refusal = index_of(kRefusals, value);
      if (!refusal || *refusal == 0)
        return fail(fmt::format("refused={} is no known refusal; they are {}", value,
                                fmt::join(std::begin(kRefusals) + 1, std::end(kRefusals), ", ")));
      reply.refused = static_cast<Refusal>(*refusal);
      continue;
    }
    if (key.starts_with("x_")) continue;
    const std::optional<ReplyField> field = reply_field_from(key);
    if (!field || !may_answer(verb, *field)) {
      std::vector<std::string_view> names = names_of(verb);
      names.insert(names.end(), besides.begin(), besides.end());
      return fail(fmt::format("an answer to {} has no field `{}`; it has {}", to_string(verb),
                              key.substr(0, 60), fmt::join(names, ", ")));
    }
    const Result<std::int64_t> number = parse_integer(value, 0, kMostInteger);
    if (!number) return fail(fmt::format("field {}: {}", key, number.error().text));
    reply.set(*field, *number);
  }
  if (reply.refused != Refusal::none)
    return Reply::refusal(reply.refused);  // a refusal has no other field
  const VerbRow& row = kVerbs[static_cast<std::size_t>(verb)];
  for (const ReplyField needed : row.reply.first(row.must))
    if (!reply.has(needed))
      return fail(fmt::format("an answer to {} carries {}=", to_string(verb), to_string(needed)));
  return reply;
}

}  // namespace lockstep
