//! The terminal of a live view: reads single keys without echo, knows the size, and restores the terminal's state at
//! the end.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcgetwinsize, tcsetattr};

/// What happened within the time limit.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Input {
    Key(u8),
    /// A signal arrived, or the terminal has gone.
    End,
    /// Neither; the window's size may have changed.
    Nothing,
}

/// Standard input and output in raw mode, until dropped.
pub(super) struct Terminal {
    before: Termios,
    end: Arc<AtomicBool>,
}

impl Terminal {
    /// Switches to the alternate screen, without echo and cursor.
    ///
    /// # Errors
    /// Where standard input is no terminal.
    pub(super) fn enter() -> io::Result<Self> {
        let end = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP, signal_hook::consts::SIGINT] {
            signal_hook::flag::register(signal, Arc::clone(&end))?;
        }
        // The handler only makes a wait end: the size is read for each drawing.
        signal_hook::flag::register(signal_hook::consts::SIGWINCH, Arc::new(AtomicBool::new(false)))?;
        let before = tcgetattr(io::stdin())?;
        let mut keys = before.clone();
        keys.local_modes.remove(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG | LocalModes::IEXTEN);
        keys.special_codes[SpecialCodeIndex::VMIN] = 0;
        keys.special_codes[SpecialCodeIndex::VTIME] = 0;
        tcsetattr(io::stdin(), OptionalActions::Flush, &keys)?;
        let terminal = Self { before, end };
        write(b"\x1b[?1049h\x1b[?25l")?;
        Ok(terminal)
    }

    /// Columns and lines; 80 by 24 if the terminal does not report them.
    pub(super) fn size(&self) -> (usize, usize) {
        let known = tcgetwinsize(io::stdout()).ok().filter(|size| size.ws_col > 0 && size.ws_row > 0);
        known.map_or((80, 24), |size| (usize::from(size.ws_col), usize::from(size.ws_row)))
    }

    /// Shows these lines in place of the old ones. Each line's rest is cleared by itself, because clearing the whole
    /// screen flickers.
    ///
    /// # Errors
    /// The terminal's error.
    pub(super) fn draw(&mut self, text: &str) -> io::Result<()> {
        let lines: Vec<&str> = text.lines().collect();
        write(format!("\x1b[H{}\x1b[K\x1b[J", lines.join("\x1b[K\r\n")).as_bytes())
    }

    /// Waits for a key, at most this long.
    ///
    /// # Errors
    /// The terminal's error.
    pub(super) fn key(&mut self, patience: Duration) -> io::Result<Input> {
        let stdin = io::stdin();
        let mut ready = [PollFd::new(&stdin, PollFlags::IN)];
        let patience = Timespec::try_from(patience).map_err(io::Error::other)?;
        match poll(&mut ready, Some(&patience)) {
            Err(rustix::io::Errno::INTR) | Ok(_) => {}
            Err(error) => return Err(error.into()),
        }
        if self.end.load(Ordering::Relaxed) {
            return Ok(Input::End);
        }
        let [ready] = &ready;
        if ready.revents().is_empty() {
            return Ok(Input::Nothing);
        }
        let mut key = [0];
        Ok(match rustix::io::read(&stdin, &mut key)? {
            0 => Input::End,
            _ => Input::Key(key[0]),
        })
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = write(b"\x1b[?25h\x1b[?1049l");
        let _ = tcsetattr(io::stdin(), OptionalActions::Flush, &self.before);
    }
}

fn write(bytes: &[u8]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(bytes)?;
    out.flush()
}
