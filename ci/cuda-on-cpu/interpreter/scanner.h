// Reads words and numbers of PTX.
#pragma once
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <string>

#include "types.h"

namespace ptx {

struct Scanner {
    const char *at = "";

    // Passes blanks and comments.
    void skip() {
        for (;;) {
            while (*at && isspace((u8)*at)) at++;
            if (at[0] == '/' && at[1] == '/') {
                rest_of_line();
            } else if (at[0] == '/' && at[1] == '*') {
                const char *end = strstr(at, "*/");
                at = end ? end + 2 : at + strlen(at);
            } else {
                return;
            }
        }
    }
    void rest_of_line() { while (*at && *at != '\n') at++; }
    void past(char c) { while (*at && *at++ != c) {} }

    bool next_is(char c) { skip(); return *at == c; }
    bool accept(char c) { return next_is(c) && (at++, true); }

    // A word with its dots: `.reg`, `ld.global.f32`, `%tid.x`, `cp.async.shared::cluster`.
    std::string word() {
        skip();
        const char *start = at;
        while (is_part(*at) || *at == '.' || (*at == ':' && at[1] == ':')) at += *at == ':' ? 2 : 1;
        return std::string(start, at);
    }
    std::string identifier() {
        skip();
        const char *start = at;
        while (is_part(*at)) at++;
        return std::string(start, at);
    }
    u64 number() {
        skip();
        char *end;
        u64 value = strtoull(at, &end, 0);
        at = *end == 'U' ? end + 1 : end;
        return value;
    }
    // 0f3F800000 and 0d3FF0000000000000: the bits of a float and of a double.
    bool next_is_float() { skip(); return *at == '0' && at[1] && strchr("fFdD", at[1]); }
    u64 float_as_bits() {
        int digits = tolower(at[1]) == 'f' ? 8 : 16;
        u64 bits = strtoull(std::string(at + 2, digits).c_str(), nullptr, 16);
        at += 2 + digits;
        return bits;
    }

 private:
    static bool is_part(char c) { return c && (isalnum((u8)c) || strchr("_$%", c)); }
};

} // namespace ptx
