//! What is known of a GPU: its name, its memory, and its peak rate by the vendor's data sheet.

/// A GPU as the driver and NVIDIA's management library report it.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpu {
    /// Such as `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// Bytes of its memory.
    pub total: u64,
    /// Bytes that no process uses; none without the management library.
    pub free: Option<u64>,
}

/// Part of the name that the driver reports, and TFLOP/s of dense bf16 products on tensor cores.
/// The first row that fits counts, so that special forms stand before the common one.
const PEAKS: [(&str, f64); 20] = [
    ("B300", 2250.0),
    ("B200", 2250.0),
    ("GH200", 989.0),
    ("H200 NVL", 835.0),
    ("H200", 989.0),
    ("H100 NVL", 835.0),
    ("H100 PCIe", 756.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A40", 149.7),
    ("A30", 165.0),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
];

impl Gpu {
    /// FLOP/s of dense bf16 products by the data sheet; none where its name is not in the table.
    pub fn bf16_flops(&self) -> Option<f64> {
        let is = |part: &str| {
            let rest = self.name.split_once(part).map(|(_, rest)| rest);
            // A10 is no A100, and H20 no H200.
            rest.is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_alphanumeric()))
        };
        PEAKS.iter().find(|(part, _)| is(part)).map(|(_, tera)| tera * 1e12)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_of_a_card_follows_from_its_name() {
        let flops = |name: &str| Gpu { name: name.into(), total: 0, free: None }.bf16_flops();
        for (name, tera) in [
            ("NVIDIA H100 80GB HBM3", 989.0),
            ("NVIDIA H100 PCIe", 756.0),
            ("NVIDIA H100 NVL", 835.0),
            ("NVIDIA H200", 989.0),
            ("NVIDIA H20", 148.0),
            ("NVIDIA A100-SXM4-80GB", 312.0),
            ("NVIDIA A10G", 70.0),
            ("NVIDIA GH200 480GB", 989.0),
            ("NVIDIA GeForce RTX 4090", 165.2),
        ] {
            assert_eq!(flops(name), Some(tera * 1e12), "{name}");
        }
        for name in ["NVIDIA A1000", "Tesla T4", ""] {
            assert_eq!(flops(name), None, "{name}");
        }
    }
}
