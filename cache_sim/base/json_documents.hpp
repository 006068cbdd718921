// The JSON documents of a file, one after another: one a line, or spread over several lines; plain
// or zstd-compressed. Only the current document is held in memory.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "reference/base/result.hpp"
#include "reference/protocol/config.hpp"

namespace lockstep::cache_sim {

/// The first bytes of a zstd frame (RFC 8878, section 3.1.1).
inline constexpr std::string_view kZstdMagic = "\x28\xB5\x2F\xFD";

/// The bytes of a file, decompressed where the file is compressed.
class ByteSource {
 public:
  virtual ~ByteSource() = default;
  /// Appends the next bytes of the file to `buffer`; false at the end of the file.
  virtual Result<bool> append_to(std::string& buffer) = 0;
};
Result<std::unique_ptr<ByteSource>> open_bytes(const std::string& path);

class JsonDocuments {
 public:
  static Result<std::unique_ptr<JsonDocuments>> open(const std::string& path);
  ~JsonDocuments();

  /// The next document, an object; null at the end of the file. The pointer is valid until the next
  /// call.
  Result<const nlohmann::json*> next();
  /// The document that the next call of next() returns.
  Result<const nlohmann::json*> peek();

  /// `path:line` of the current document's first line.
  std::string place() const;
  const std::string& path() const { return path_; }
  std::int64_t line() const { return document_line_; }

 private:
  JsonDocuments(std::string path, std::unique_ptr<ByteSource> bytes);
  Result<bool> fill();
  Result<bool> skip_blanks();
  Result<std::size_t> find_end();
  Result<const nlohmann::json*> read();

  std::string path_;
  std::unique_ptr<ByteSource> bytes_;
  std::string buffer_;
  std::size_t at_ = 0;       // the first byte of buffer_ that is not read yet
  std::int64_t line_ = 1;    // the line of that byte
  std::int64_t fields_ = 0;  // names in the document that is read
  std::int64_t document_line_ = 1;
  bool ended_ = false;
  bool peeked_ = false;
  std::unique_ptr<nlohmann::json> document_;
};

/// The latest arrival that a workload can name. The serving time is allowed to be as long again and
/// still fits 64 bits.
inline constexpr Nanoseconds kLatestTime = Nanoseconds{1} << 62;

/// An object of a document, with its place in the file for errors that name the field.
class Record {
 public:
  Record(const nlohmann::json& object, std::string place, std::string path = "")
      : object_(&object), place_(std::move(place)), path_(std::move(path)) {}

  bool has(std::string_view field) const { return find(field) != nullptr; }
  Result<std::int64_t> integer(std::string_view field, std::int64_t low, std::int64_t high) const;
  /// A number, whole or not, in units of `unit` nanoseconds; not negative, at most kLatestTime.
  Result<Nanoseconds> time(std::string_view field, Nanoseconds unit) const;
  /// Such a number, counted from `earlier`; the sum is at most kLatestTime as well.
  Result<Nanoseconds> time_after(Nanoseconds earlier, std::string_view field,
                                 Nanoseconds unit) const;
  Result<std::string> text(std::string_view field) const;
  Result<bool> flag(std::string_view field) const;
  Result<Record> object(std::string_view field) const;
  Result<std::vector<std::int64_t>> integers(std::string_view field, std::int64_t low,
                                             std::int64_t high) const;
  Result<std::vector<std::int64_t>> token_ids(std::string_view field) const;  ///< of 32 bits
  /// Numbers, whole or not, none of them negative.
  Result<std::vector<double>> numbers(std::string_view field) const;
  Result<std::vector<Record>> objects(std::string_view field) const;

  /// `path:line: field NAME: TEXT`.
  tl::unexpected<Error> error(std::string_view field, const std::string& text) const;

 private:
  const nlohmann::json* find(std::string_view field) const;
  Result<const nlohmann::json*> need(std::string_view field) const;

  const nlohmann::json* object_;
  std::string place_;
  std::string path_;
};

}  // namespace lockstep::cache_sim
