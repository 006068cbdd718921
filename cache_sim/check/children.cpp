#include "cache_sim/check/children.hpp"

#include <utility>

namespace lockstep::cache_sim {

std::unique_ptr<ChildProcess> Children::take(const std::string& command) {
  const std::lock_guard lock(guard_);
  const auto found = idle_.find(command);
  if (found == idle_.end()) return nullptr;
  std::unique_ptr<ChildProcess> process = std::move(found->second);
  idle_.erase(found);
  return process;
}

void Children::give_back(const std::string& command, std::unique_ptr<ChildProcess> process) {
  const std::lock_guard lock(guard_);
  idle_.emplace(command, std::move(process));
}

Children::Unsupported Children::unsupported(Driver driver) const {
  const std::lock_guard lock(guard_);
  const auto found = unsupported_.find(driver);
  return found == unsupported_.end() ? Unsupported() : found->second;
}

Children::Unsupported Children::unsupported() const {
  const std::lock_guard lock(guard_);
  Unsupported all;
  for (const auto& [driver, forms] : unsupported_) all.insert(forms.begin(), forms.end());
  return all;
}

void Children::note_unsupported(Driver driver, const std::string& form,
                                const std::string& sentence) {
  const std::lock_guard lock(guard_);
  unsupported_[driver].emplace(form, sentence);
}

std::set<std::string> Children::remarks() const {
  const std::lock_guard lock(guard_);
  return remarks_;
}

void Children::remark(const std::string& sentence) {
  const std::lock_guard lock(guard_);
  remarks_.insert(sentence);
}

}  // namespace lockstep::cache_sim
