// Planted defects: a policy with one rule broken, so that the harness can show that it would find
// it.
#pragma once

#include <string_view>

#include "reference/base/registry.hpp"

namespace lockstep {

class Defect;

struct DefectEntry {
  std::string_view name;  ///< `subject:name`, what --defect takes
  std::string_view sentence;
  const Defect* defect;
};

/// A constant at file scope registers itself; the code beside the rule asks `planted(kThatDefect)`.
class Defect {
 public:
  Defect(std::string_view name, std::string_view sentence)
      : registration_({name, sentence, this}) {}
  Defect(const Defect&) = delete;
  Defect& operator=(const Defect&) = delete;

  static const Defect* find(std::string_view name) {
    const DefectEntry* const entry = Registry<DefectEntry>::find(name);
    return entry == nullptr ? nullptr : entry->defect;
  }

 private:
  Registration<DefectEntry> registration_;
};

}  // namespace lockstep
