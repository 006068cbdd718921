// Operations and replies: the one vocabulary in which schedulers, traces, policies, oracles and
// child processes speak (cache_sim/trace/grammar.md). An operation is a line `verb
// key=value …`; a reply is a line `key=value …`.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "reference/base/ids.hpp"
#include "reference/base/mix.hpp"
#include "reference/base/result.hpp"
#include "reference/protocol/capability.hpp"
#include "reference/protocol/tokens.hpp"

namespace lockstep {

enum class Verb : std::uint8_t {
  // Request verbs: what every subject understands.
  admit,
  extend,
  accept,
  checkpoint,
  finish,
  abort,
  preempt,
  step,
  complete,
  capture,
  restore,
  compact,
  evict,
  flush,
  check,
  // Tree verbs: the radix families.
  match,
  alloc,
  advance,
  fork,
  copy,
  insert,
  lock,
  unlock,
  free,
  // Sequence verbs: engines whose requests are sequences of one memory.
  clone,
  truncate,
  // Copies between tiers of memory.
  land,
  settle,
  fail,
  // Requests that move from one server to another.
  load,
};
inline constexpr std::size_t kVerbCount = static_cast<std::size_t>(Verb::load) + 1;

std::string_view to_string(Verb verb);
/// The capability that a subject needs for the verb.
Capability capability_of(Verb verb);

/// Tokens of a prompt that stand for an image.
struct ImageSpan {
  std::uint32_t begin = 0;  ///< of the prompt's tokens
  std::uint32_t size = 0;
  Name name;  ///< equal names are equal images; none: its tokens say which image it is
  std::uint32_t end() const { return begin + size; }
  bool operator==(const ImageSpan&) const = default;
};

/// OFFSET:LENGTH[:NAME],…, each after the one before.
Result<std::vector<ImageSpan>> parse_images(std::string_view list);
std::string images_text(const std::vector<ImageSpan>& images);

/// One operation. A field that a verb does not have keeps its default; absent numbers are kAbsent.
struct Operation {
  static constexpr std::int64_t kAbsent = -1;

  Verb verb = Verb::check;
  bool insert = true;                 ///< finish: leave the request's tokens in the cache
  bool async = false;                 ///< extend: the result arrives with a `complete`
  bool late = false;                  ///< admit: the deadline of its prefetch has passed
  bool partial = false;               ///< capture: the recurrent state alone
  Name id;                            ///< the request
  Name salt;                          ///< admit, match, insert: the namespace
  Name lora;                          ///< admit: the adapter that computes KV and states
  Name slot, as, from, to, lock;      ///< names that tree verbs and slot caches give; clone: `as`
  Name tier;                          ///< land, fail, evict: a memory, such as `device` or `host`
  Tokens tokens;                      ///< see the verb
  Tokens drafts;                      ///< extend: draft tokens to verify
  std::int64_t n = kAbsent;           ///< extend: tokens to compute; accept: tokens kept
  std::int64_t prompt = kAbsent;      ///< admit: how many of `tokens` are the original prompt
  std::int64_t external = kAbsent;    ///< admit: tokens whose KV and state came by transfer
  std::int64_t up_to = kAbsent;       ///< checkpoint, clone, truncate, finish: length; absent: all
  std::int64_t limit = kAbsent;       ///< match: tokens to look at
  std::int64_t prev = kAbsent;        ///< insert: tokens whose KV the tree owns already
  std::int64_t kv = kAbsent;          ///< evict: KV tokens
  std::int64_t state = kAbsent;       ///< evict: states
  std::int64_t room = kAbsent;        ///< admit, evict: KV tokens that are to be left, or free
  std::int64_t padded = kAbsent;      ///< step: rows of the captured graph
  std::int64_t rank = kAbsent;        ///< fail: the one rank of several on which it failed
  std::vector<Name> ids;              ///< step: row order
  std::vector<ImageSpan> images;      ///< admit: those of its tokens that are images, named
  std::vector<std::int64_t> mapping;  ///< compact: new row of each row, -1: gone
  std::vector<std::int64_t> parents;  ///< extend: by draft, the one before it; see VerifiedRow

  /// The line, fields sorted. Token lists longer than `limit` characters are cut in the middle; 0:
  /// nothing is cut.
  std::string text(std::size_t limit = 0) const;
};

/// The reply's fields. They are printed in alphabetical order; a new one goes to the end here,
/// because a run's digest is made of these numbers.
enum class ReplyField : std::uint8_t {
  branch,
  cached,
  conv,
  evicted_kv,
  evicted_states,
  exist,
  finish,
  finished,
  freed_kv,
  junction,
  kv,
  kv_free,
  kv_locked,
  length,
  n,
  output_tokens,
  slot,
  state,
  states,
  states_free,
  states_locked,
  time,
  violations,
  blocks,
  output,
  contents,
  host,
  host_kv_free,
  host_states_free,
  window_free,
  window_locked,
};
inline constexpr std::size_t kReplyFieldCount =
    static_cast<std::size_t>(ReplyField::window_locked) + 1;

std::string_view to_string(ReplyField field);
std::optional<ReplyField> reply_field_from(std::string_view name);

/// Whether an answer to the verb can carry the field.
bool may_answer(Verb verb, ReplyField field);

/// Why an operation was not done. A refusal changes nothing but what eviction freed on the way.
/// `unsupported` is a child's alone: its server never does this.
enum class Refusal : std::uint8_t {
  none,
  no_kv,
  no_state_slot,
  no_row,
  same_step,
  too_long,
  unsupported,
};
std::string_view to_string(Refusal refusal);

/// The ways in which a request can end: the values of `finish=`.
enum class FinishReason : std::uint8_t { running, stop, length, abort, refused };
std::string_view to_string(FinishReason reason);

/// One reply: a refusal, or numbers by field.
class Reply {
 public:
  static constexpr std::size_t kMostFields = 12;  ///< a reply is copied often, so it stays small

  Refusal refused = Refusal::none;

  // Replies are made and copied for every operation of every run. A copy touches the values that
  // are set and no others, one by one: a wider load has to wait for the narrow stores just before
  // it.
  Reply() {}
  Reply(const Reply& other) { *this = other; }
  Reply& operator=(const Reply& other) {
    refused = other.refused;
    count_ = other.count_;
    present_ = other.present_;
    order_ = other.order_;
    copy_values(other, std::make_index_sequence<kMostFields>());
    return *this;
  }
  static Reply refusal(Refusal reason) {
    Reply reply;
    reply.refused = reason;
    return reply;
  }

  /// At most kMostFields different ones.
  Reply& set(ReplyField field, std::int64_t value) {
    values_[place(field)] = value;
    return *this;
  }
  bool has(ReplyField field) const { return (present_ & bit(field)) != 0; }
  /// The field's value, or `otherwise` where the reply does not carry it.
  std::int64_t get(ReplyField field, std::int64_t otherwise = 0) const {
    return has(field) ? values_[index_of(field)] : otherwise;
  }
  bool operator==(const Reply& other) const;
  /// Every field and its value, and the refusal, into a rolling digest.
  void add_to(Digest& digest) const;

  /// The first field that both replies carry with different values (a refusal differs from
  /// everything but itself).
  struct Difference {
    std::string field, here, there;
  };
  std::optional<Difference> difference(const Reply& other) const;
  /// The same, where a field that one of the two lacks is a difference as well; `violations`, which
  /// the run itself adds to one of them, aside.
  std::optional<Difference> exact_difference(const Reply& other) const;

  std::string value_text(ReplyField field) const;
  std::string text()
      const;  ///< `cached=0 state=0` or `refused=no_kv`; `ok` where there is nothing to say

 private:
  static constexpr std::uint32_t bit(ReplyField field) {
    return 1u << static_cast<unsigned>(field);
  }
  static constexpr unsigned kFieldBits = 5;
  static_assert(kReplyFieldCount <= std::size_t{1} << kFieldBits && kMostFields * kFieldBits <= 64);

  ReplyField field_at(std::size_t i) const {
    return static_cast<ReplyField>(order_ >> (i * kFieldBits) & ((1u << kFieldBits) - 1));
  }
  /// Of a field that is there.
  std::size_t index_of(ReplyField field) const {
    std::size_t i = 0;
    while (i + 1 < kMostFields && field_at(i) != field) ++i;
    return i;
  }
  /// The place that holds the field's value.
  std::size_t place(ReplyField field) {
    if (has(field)) return index_of(field);
    if (count_ == kMostFields) throw_full();
    present_ |= bit(field);
    order_ |= static_cast<std::uint64_t>(field) << (count_ * kFieldBits);
    return count_++;
  }
  template <std::size_t... i>
  void copy_values(const Reply& other, std::index_sequence<i...>) {
    static_cast<void>(((i < count_ && (values_[i] = other.values_[i], true)) && ...));
  }
  [[noreturn]] static void throw_full();

  std::uint32_t count_ = 0;
  std::uint32_t present_ = 0;
  std::uint64_t order_ = 0;  // the fields, kFieldBits each, in the order of setting
  std::array<std::int64_t, kMostFields> values_;  // the first count_ of them
};

/// A line `verb key=value …`, split but not interpreted.
struct Line {
  std::string_view verb;
  std::vector<std::pair<std::string_view, std::string_view>> fields;
  std::optional<std::string_view> find(std::string_view key) const;
};

/// Splits a line at blanks. Refuses control characters, fields without `=` and fields that stand
/// twice. An answer has no verb.
Result<Line> parse_line(std::string_view text, bool has_verb = true);

/// The operation that a line spells; unknown verbs and fields, missing and malformed ones are
/// errors that name the field.
Result<Operation> parse_operation(const Line& line);
bool is_operation_verb(std::string_view verb);

/// The part of an operation that a subject does not understand, and the capability that it lacks.
struct Lack {
  std::string_view kind, what;  ///< "field " and its name; both empty: the verb
  Capability needs{};
  /// The rest of a sentence that begins with the subject's name, "takes no field parents: it
  /// verifies no trees of drafts".
  std::string text() const;
};
/// Whether a subject with these capabilities understands the operation: its verb and every field
/// that it carries. Nothing where it does.
std::optional<Lack> lack_for(const Operation& operation, Capabilities capabilities);

/// The kind of an operation: its verb and the optional fields that it carries, for example
/// `checkpoint up_to` or `extend async tokens`.
std::string operation_form(const Operation& operation);

/// Parses a child's answer. `verb` decides which fields it must carry and which it may. Any other
/// field is an error, so that a misspelt field does not pass for a missing one; fields named
/// `x_NAME` are ignored. The error lists the fields, and `besides`, which the caller has read.
Result<Reply> parse_reply(std::string_view text, Verb verb,
                          std::span<const std::string_view> besides = {});

}  // namespace lockstep
