#pragma once

#include <string>
#include <vector>

namespace ppfsdp::train {

/// The files that `pattern` matches, sorted by path, byte by byte. In a path's components `*`, `?`
/// and
/// `[...]` match as in a shell, a leading dot only by a dot; a component `**` matches any number of
/// folders, without following symbolic links to folders. A pattern that names a file, or holds none
/// of these characters, stands for itself, whether the file exists or not. Folders are never
/// matched, and those that can't be listed hold no match.
std::vector<std::string> expand_glob(const std::string& pattern);

}  // namespace ppfsdp::train
