// The configuration of a run: the fields of a `config` line, of --config and of a child's `hello`
// line.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "reference/base/result.hpp"

namespace lockstep {

using Nanoseconds = std::int64_t;
inline constexpr Nanoseconds kSecond = 1'000'000'000;

/// A small set of names of fields.
class ConfigFields {
 public:
  ConfigFields() = default;
  ConfigFields(std::initializer_list<std::string_view> names)
      : names_(names.begin(), names.end()) {}
  bool contains(std::string_view name) const { return names_.contains(name); }
  void add(std::string_view name) { names_.emplace(name); }
  ConfigFields operator&(const ConfigFields& other) const {
    ConfigFields both;
    for (const std::string& name : names_)
      if (other.contains(name)) both.add(name);
    return both;
  }
  auto begin() const { return names_.begin(); }
  auto end() const { return names_.end(); }

 private:
  std::set<std::string, std::less<>> names_;
};

/// A field that a family of policies has beside the common ones, registered in the family's folder.
struct ConfigOption {
  std::string_view name;
  std::string_view otherwise;  ///< its value where nobody sets it
  /// A number within [low, high]; otherwise a text without blanks.
  struct Range {
    std::int64_t low, high;
  };
  std::optional<Range> number{};
  bool for_children = false;    ///< a child may say that it honours it
  ConfigFields needs{};         ///< it has no effect where one of these is at its default
  ConfigFields overruled_by{};  ///< it has no effect where one of these is not
};
/// The fields that a child may honour.
ConfigFields fields_for_children();
/// The fields without which a field, common or registered, has no effect.
ConfigFields needs_of(std::string_view field);
/// The name as it stands in the table of all fields; nothing where there is no such field.
std::optional<std::string_view> config_field_from(std::string_view name);
/// Takes the first `key=value` from a list `key=value,key=value`. A value may hold commas and `=`.
std::string_view take_setting(std::string_view& list);

/// The fields that every policy and scheduler share. Integers count tokens, slots, rows, bytes or
/// tokens per something, as the name says; flags are 0 or 1.
struct Config {
  std::string policy;               ///< empty: the default one beside its oracle
  std::int64_t kv_tokens = 131072;  ///< KV slots that requests can use
  std::int64_t state_slots =
      256;                ///< state slots that requests can use; the reserved slot 0 is extra
  std::int64_t page = 1;  ///< tokens per KV page
  std::int64_t chunked_prefill = 8192;  ///< tokens that one prefill step spends at most
  std::int64_t max_running = 256;       ///< requests that run at once
  std::int64_t request_rows = 0;        ///< rows of the request table; 0: max_running
  Nanoseconds step_time = 1'000'000;    ///< of a step under the constant cost model
  std::int64_t model_chunk = 64;  ///< tokens between the states that a prefill kernel can show
  std::int64_t overlap = 0;       ///< decisions one step ahead of results
  std::int64_t drafts = 0;        ///< draft tokens per verification
  std::string graph_batches;      ///< captured batch sizes, 4,8
  std::int64_t ranks = 1;         ///< data-parallel ranks
  std::string routing;            ///< load, round, prefix or balanced
  std::string scheduler;          ///< its name and options; empty: the plain one
  std::int64_t kv_stride = 0;     ///< elements from one KV slot of a layer to the next
  std::int64_t state_stride = 0;  ///< the same of state slots; 0: offsets are not looked at
  std::int64_t pool_bytes = 0;    ///< one pool for KV and states; 0: counted pools
  std::int64_t state_share = 0;   ///< per mille of pool_bytes for states, where there are two pools

  std::map<std::string, std::string, std::less<>> options;  ///< registered ones, not at defaults

  /// The value of a registered option.
  std::string text(std::string_view option) const;
  std::int64_t number(std::string_view option) const;
  /// Sets a registered option, within its range.
  void put(std::string_view option, std::string_view value);
  void put(std::string_view option, std::int64_t value) { put(option, std::to_string(value)); }

  std::int64_t rows() const { return request_rows != 0 ? request_rows : max_running; }
  /// The numbers of graph_batches, ascending; empty where it is not such a list (start_subject
  /// refuses it).
  std::vector<std::int64_t> graphs() const;
  /// The fields that are set, and have no effect because of another field.
  struct Idle {
    std::string field;
    std::string why;  ///< the end of a sentence: `without host_kv=` or `beside alpha=`
  };
  std::vector<Idle> idle() const;
  void drop_idle();
  bool operator==(const Config&) const = default;

  /// Sets one field from its text. The error is a sentence without file and line.
  Result<void> set(std::string_view field, std::string_view value);

  /// Sets `key=value,key=value`, the form of --config. `named`: the fields of the list are added.
  Result<void> set_all(std::string_view list, ConfigFields* named = nullptr);

  /// Every field as `key=value`, sorted by key, for a child's `hello` and a run's JSON.
  std::vector<std::pair<std::string, std::string>> fields() const;

  /// One field's value; nothing where there is no such field.
  std::optional<std::string> find(std::string_view field) const;

  /// The fields whose value is not the default, sorted by name.
  std::vector<std::string> changed() const;
};

/// A time of the grammar: digits and ns, us, ms or s.
Result<Nanoseconds> parse_time(std::string_view text);
std::string time_text(Nanoseconds time);

inline constexpr std::int64_t kMostInteger = std::numeric_limits<std::int64_t>::max();

/// A number within [low, high]: decimal, or also 0x… if `hexadecimal`. The error says what is wrong
/// with the text.
Result<std::int64_t> parse_integer(std::string_view text, std::int64_t low, std::int64_t high);

}  // namespace lockstep
