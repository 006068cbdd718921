#include "cache_sim/report/recorded.hpp"

#include <filesystem>
#include <limits>

#include "cache_sim/base/json_documents.hpp"

namespace lockstep::cache_sim {
namespace {

Result<RecordedDecisions> read_record(const Record& record) {
  const Result<std::string> policy = record.text("policy");
  if (!policy) return tl::unexpected(policy.error());
  const Result<std::string> of = record.text("of");
  if (!of) return tl::unexpected(of.error());
  const Result<std::string> digest = record.text("decision_digest");
  if (!digest) return tl::unexpected(digest.error());
  const auto hits = record.integer("hit_tokens", 0, std::numeric_limits<std::int64_t>::max());
  if (!hits) return tl::unexpected(hits.error());
  return RecordedDecisions{*policy, *of, *digest, *hits};
}

}  // namespace

Result<std::vector<RecordedDecisions>> recorded_decisions(const std::string& path,
                                                          const std::string& workload) {
  std::vector<RecordedDecisions> decisions;
  std::error_code none;
  if (!std::filesystem::exists(path, none)) return decisions;
  Result<std::unique_ptr<JsonDocuments>> documents = JsonDocuments::open(path);
  if (!documents) return tl::unexpected(documents.error());
  const Result<const nlohmann::json*> document = (*documents)->next();
  if (!document) return tl::unexpected(document.error());
  if (*document == nullptr) return fail(path + ": the file is empty");
  const Record file(**document, (*documents)->place());
  const Result<std::string> about = file.text("workload");
  if (!about) return tl::unexpected(about.error());
  if (*about != workload) return decisions;
  const Result<std::vector<Record>> records = file.objects("records");
  if (!records) return tl::unexpected(records.error());
  for (const Record& one : *records) {
    Result<RecordedDecisions> record = read_record(one);
    if (!record) return tl::unexpected(record.error());
    decisions.push_back(std::move(*record));
  }
  return decisions;
}

}  // namespace lockstep::cache_sim
