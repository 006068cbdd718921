// The words of the grammar as lists: `lockstep list verbs --json`, which the Python package reads,
// and the tests of pages and editors.
#pragma once

#include <string_view>
#include <vector>

#include "reference/protocol/operation.hpp"

namespace lockstep {

struct FieldName {
  std::string_view name;
  bool required;
  /// Of an operation's field: flag, images, name, names, number, numbers or tokens.
  std::string_view kind{};
  Capability needs = Capability::request;
};

/// The fields of an operation's line, sorted by name.
std::vector<FieldName> fields_of(Verb verb);

/// The fields of its answer: first those that it must carry where it is no refusal. What its
/// evictions cost (evicted_kv, evicted_states) any answer can carry.
std::vector<FieldName> answer_fields_of(Verb verb);

}  // namespace lockstep
