//! Examples for users do what they say.

#[path = "../../examples/own_schedule.rs"]
mod own_schedule;

#[test]
fn a_schedule_of_ones_own_is_verified_simulated_drawn_and_trained_with() {
    own_schedule::main().unwrap();
}
