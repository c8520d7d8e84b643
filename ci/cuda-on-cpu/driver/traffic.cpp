#include "traffic.h"

#include <algorithm>
#include <cstring>

namespace driver {

constexpr uint64_t SECTOR = 32;

thread_local Traffic *traffic;

Traffic::Traffic(const ptx::Kernel &kernel, const unsigned char *params) {
    starts.push_back(0); // of what belongs to none
    for (auto [offset, size] : kernel.params) {
        Address at;
        if (size != sizeof at) continue;
        memcpy(&at, params + offset, sizeof at);
        starts.push_back(at);
    }
    std::sort(starts.begin(), starts.end());
    starts.erase(std::unique(starts.begin(), starts.end()), starts.end());
    for (auto &part : parts) part.resize(starts.size());
}

void Traffic::add(Address at, uint64_t bytes, bool write) {
    auto &all = touched[write];
    for (uint64_t sector = at / SECTOR; sector <= (at + bytes - 1) / SECTOR; sector++)
        if (all.empty() || all.back() != sector) all.push_back(sector);
}

void Traffic::end_block() {
    for (int write = 0; write < 2; write++) {
        auto &all = touched[write];
        std::sort(all.begin(), all.end());
        all.erase(std::unique(all.begin(), all.end()), all.end());
        size_t of = 0;
        for (uint64_t sector : all) {
            // A parameter's first byte may lie within the sector.
            while (of + 1 < starts.size() && starts[of + 1] < (sector + 1) * SECTOR) of++;
            Part &part = parts[write][of];
            part.sectors++;
            part.first = std::min(part.first, sector);
            part.last = std::max(part.last, sector);
        }
        all.clear();
    }
}

Traffic::Bytes Traffic::bytes(double each) const {
    Bytes b{0, 0, 0};
    for (int write = 0; write < 2; write++)
        for (const Part &part : parts[write]) {
            if (!part.sectors) continue;
            double asked = part.sectors * each, between = part.last - part.first + 1;
            (write ? b.written : b.read) += SECTOR * std::min(asked, between);
            b.asked += SECTOR * asked;
        }
    return b;
}

} // namespace driver
