#include "cache_sim/workloads/workload.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <fstream>

#include "cache_sim/base/input.hpp"

namespace lockstep::cache_sim {
namespace {

/// The first `limit` requests of another stream.
class LimitedStream final : public RequestStream {
 public:
  LimitedStream(std::unique_ptr<RequestStream> all, std::int64_t limit)
      : all_(std::move(all)), left_(limit) {}

  Result<bool> next(RequestSpec& spec) override {
    if (left_ == 0) return false;
    --left_;
    return all_->next(spec);
  }
  std::uint32_t block_size() const override { return all_->block_size(); }
  bool knows_outputs() const override { return all_->knows_outputs(); }

 private:
  std::unique_ptr<RequestStream> all_;
  std::int64_t left_;
};

OpenedStream open_file(const std::string& path) {
  Result<std::unique_ptr<JsonDocuments>> documents = JsonDocuments::open(path);
  if (!documents) {
    Error error = documents.error();
    if (!std::filesystem::exists(path)) error.text += "; `lockstep list workloads` shows names";
    return tl::unexpected(std::move(error));
  }
  const Result<const nlohmann::json*> first = (*documents)->peek();
  if (!first) return tl::unexpected(first.error());
  if (*first == nullptr) return fail(path + ": the file holds no request");
  for (const WorkloadFormat& format : Registry<WorkloadFormat>::all())
    if (format.recognises(**first)) return format.open(std::move(*documents));
  return fail(
      fmt::format("{}: its fields are those of no known workload; `lockstep list "
                  "workloads` shows the formats",
                  (*documents)->place()));
}

}  // namespace

const GeneratedWorkload* find_generated(std::string_view word) {
  return Registry<GeneratedWorkload>::find(word.substr(0, word.find(':')));
}

bool is_workload_file(const std::string& path) {
  Result<std::ifstream> file = open_input(path);
  if (!file) return false;
  char head[4] = {};
  file->read(head, sizeof head);
  const std::string_view read(head, static_cast<std::size_t>(file->gcount()));
  if (read == kZstdMagic) return true;
  file->clear();
  file->seekg(0);
  char first = ' ';
  while (file->get(first) && (first == ' ' || first == '\t' || first == '\n' || first == '\r')) {
  }
  return *file && first == '{';
}

OpenedStream open_workload(const std::string& word, std::int64_t limit) {
  OpenedStream stream = nullptr;
  if (const GeneratedWorkload* const generated = find_generated(word)) {
    const std::size_t colon = std::min(word.find(':'), word.size());
    stream = generated->open(std::string_view(word).substr(std::min(colon + 1, word.size())));
    if (!stream) return fail(fmt::format("{}: {}", word, stream.error().text));
  } else {
    stream = open_file(word);
  }
  if (!stream || limit == 0) return stream;
  return std::make_unique<LimitedStream>(std::move(*stream), limit);
}

}  // namespace lockstep::cache_sim
