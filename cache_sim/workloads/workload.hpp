// Workloads: what clients asked, request by request. A file's format is told by its content, a
// generated workload by its name; both are streams, so that a million requests are never held in
// memory. A new format or generator is a new file that registers itself at its foot.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "cache_sim/base/json_documents.hpp"
#include "reference/base/registry.hpp"
#include "reference/protocol/request.hpp"

namespace lockstep::cache_sim {

/// Requests in order of arrival.
class RequestStream {
 public:
  virtual ~RequestStream() = default;

  /// The next request, arrival included; false at the end, where `spec` is left alone. An error
  /// names file, line and field.
  virtual Result<bool> next(RequestSpec& spec) = 0;

  /// Tokens in which prefixes are shared: those of a block of the trace, or 1 where the tokens
  /// themselves are known.
  virtual std::uint32_t block_size() const { return 1; }
  /// Whether later prompts can contain what earlier requests answered. The public block traces
  /// name the blocks of prompts alone.
  virtual bool knows_outputs() const { return true; }
};

using OpenedStream = Result<std::unique_ptr<RequestStream>>;

/// A workload that is made from parameters: `NAME[:key=value,…]`.
struct GeneratedWorkload {
  std::string_view name;
  std::string_view summary;
  std::string_view parameters;  ///< their names, as `lockstep list workloads` shows them
  OpenedStream (*open)(std::string_view parameters);
};

/// A format of workload files, lines or documents of JSON.
struct WorkloadFormat {
  std::string_view name;
  std::string_view summary;
  bool (*recognises)(const nlohmann::json& first);  ///< by the fields of the first document
  OpenedStream (*open)(std::unique_ptr<JsonDocuments> documents);
};

/// The generated workload that a word of the command line names; null where it names a file.
const GeneratedWorkload* find_generated(std::string_view word);

/// Whether a file is a workload and no trace: it begins with a JSON object or as zstd does.
/// False where it cannot be read.
bool is_workload_file(const std::string& path);

/// Opens a generated workload or a file. `limit` requests at most; 0: all of them.
OpenedStream open_workload(const std::string& word, std::int64_t limit = 0);

// --- Documents of tokens -------------------------------------------------------------------------

/// Prompts of workloads are made of documents that no trace can name (names of up to six letters
/// are below 2^29). Outputs are those of trace files: numbers from 2^30 on.
inline constexpr Document kBlockDocuments = Document{1} << 29;  ///< + number of a block
inline constexpr std::uint32_t kMostBlocks = 1u << 28;          ///< different blocks of a file
inline constexpr Document kSessionDocuments = kBlockDocuments + kMostBlocks;
inline constexpr std::uint32_t kMostSessionDocuments = 1u << 28;
inline constexpr Document kOutputDocuments = Document{1} << 30;  ///< + number of a request
inline constexpr std::int64_t kMostRequests = (std::int64_t{1} << 30) - 2;

/// The id of a workload's request: r0, r1, …
Name request_name(std::int64_t number);

}  // namespace lockstep::cache_sim
