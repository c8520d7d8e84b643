//! The page's calls: a request is written to memory, its answer is read from there.

/// Room for a request of `length` bytes.
#[unsafe(no_mangle)]
pub extern "C" fn room(length: usize) -> *mut u8 {
    let buffer = vec![0u8; length].into_boxed_slice();
    Box::into_raw(buffer).cast()
}

/// Answers the request in [`room`], which it takes back. The answer has its length before it, as
/// four bytes, and is given back by [`done`].
///
/// # Safety
/// `request` and `length` are those of a call of [`room`] that was not answered yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ask(request: *mut u8, length: usize) -> *mut u8 {
    // SAFETY: `room` gave a box of these bytes away, and the caller has not asked with it before.
    let request = unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(request, length)) };
    let answer = crate::answer(&String::from_utf8_lossy(&request));
    let mut bytes = (answer.len() as u32).to_le_bytes().to_vec();
    bytes.extend_from_slice(answer.as_bytes());
    Box::into_raw(bytes.into_boxed_slice()).cast()
}

/// Takes an answer back.
///
/// # Safety
/// `answer` is what [`ask`] returned, and was not given back.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn done(answer: *mut u8) {
    // SAFETY: `ask` gave a box away that begins with its length.
    unsafe {
        let length = u32::from_le_bytes(*answer.cast::<[u8; 4]>()) as usize + 4;
        drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut(answer, length)));
    }
}
