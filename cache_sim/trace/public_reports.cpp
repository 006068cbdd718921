#include "cache_sim/trace/public_reports.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

namespace lockstep::cache_sim {

std::string reference_url(const std::string& reference) {
  const std::size_t number = reference.find(" #");
  if (number == std::string::npos) return "";
  const PublicProject* const project = Registry<PublicProject>::find(reference.substr(0, number));
  if (project == nullptr || project->repository.empty()) return "";
  return fmt::format("https://github.com/{}/issues/{}", project->repository,
                     reference.substr(number + 2));
}

std::vector<std::string> public_references(const std::vector<std::string>& description) {
  std::vector<std::string> references;
  std::string project;
  for (const std::string& line : description) {
    for (std::size_t at = 0; at < line.size();) {
      const bool is_number = line[at] == '#';
      std::size_t end = at + (is_number ? 1 : 0);
      const auto belongs = [&](char c) {
        const auto letter = static_cast<unsigned char>(c);
        return is_number ? std::isdigit(letter) != 0 : std::isalnum(letter) != 0 || c == '-';
      };
      while (end < line.size() && belongs(line[end])) ++end;
      std::string word = line.substr(at, end - at);
      at = std::max(end, at + 1);
      std::string lower = word;
      for (char& c : lower) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
      if (Registry<PublicProject>::find(lower) != nullptr) project = lower;
      if (!is_number || word.size() < 3) continue;
      std::string reference = project.empty() ? word : fmt::format("{} {}", project, word);
      if (std::ranges::find(references, reference) == references.end())
        references.push_back(std::move(reference));
    }
  }
  return references;
}

namespace {

const Registration<PublicProject> kProjects{{"flashinfer", "flashinfer-ai/flashinfer"},
                                            {"flash-attention", "Dao-AILab/flash-attention"},
                                            {"transformers", "huggingface/transformers"},
                                            {"pytorch", "pytorch/pytorch"},
                                            {"dynamo", "ai-dynamo/dynamo"},
                                            {"mobius"},
                                            {"mlx-swift-lm", "ml-explore/mlx-swift-lm"}};

}  // namespace
}  // namespace lockstep::cache_sim
