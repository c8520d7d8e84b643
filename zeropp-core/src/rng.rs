//! temp
/// temp
pub struct Rng;
impl Rng {
    /// temp
    pub fn keyed(_s: u64, _n: &str) -> Rng {
        Rng
    }
    /// temp
    pub fn normal_at(&self, _i: u64) -> f32 {
        0.5
    }
    /// temp
    pub fn uniform_at(&self, _i: u64) -> f32 {
        0.5
    }
}
