// Planted defects: a policy with one rule broken, so that the harness can show that it would find
// it. A family keeps its rules in a struct of named members; its variants are values of that
// struct, and a defect is one member set to a wrong value.
#pragma once

#include <functional>
#include <string_view>
#include <type_traits>

#include "reference/base/registry.hpp"

namespace lockstep {

class Defect;

struct DefectEntry {
  std::string_view name;  ///< `subject:name`, what --defect takes
  std::string_view sentence;
  const Defect* defect;
  /// Config fields without which it cannot show, `key=value,…`; a search for it keeps them.
  std::string_view needs{};
};

/// A constant at file scope registers itself.
class Defect {
 public:
  Defect(std::string_view name, std::string_view sentence, std::string_view needs = {})
      : registration_{{name, sentence, this, needs}} {}
  virtual ~Defect() = default;
  Defect(const Defect&) = delete;
  Defect& operator=(const Defect&) = delete;

  static const Defect* find(std::string_view name) {
    const DefectEntry* const entry = Registry<DefectEntry>::find(name);
    return entry == nullptr ? nullptr : entry->defect;
  }

 private:
  Registration<DefectEntry> registration_;
};

/// A row of a family's defects: name, sentence, the rule that it sets to `wrong`, and what it
/// needs.
template <class Rules>
class BrokenRule final : public Defect {
 public:
  template <class Value>
  BrokenRule(std::string_view name, std::string_view sentence, Value Rules::*rule,
             std::type_identity_t<Value> wrong, std::string_view needs = {})
      : Defect(name, sentence, needs), change_([=](Rules& rules) { rules.*rule = wrong; }) {}

  void change(Rules& rules) const { change_(rules); }

 private:
  std::function<void(Rules&)> change_;
};

/// The rules that a policy follows while `planted` is its defect: null and another family's defects
/// change nothing.
template <class Rules>
Rules with_defect(Rules rules, const Defect* planted) {
  if (const auto* const broken = dynamic_cast<const BrokenRule<Rules>*>(planted))
    broken->change(rules);
  return rules;
}

}  // namespace lockstep
