//! The web page of the server: one file, assembled from those in `page/`. It holds no secrets and loads nothing else.

use axum::http::header;
use axum::response::{IntoResponse, Response};
use std::hash::{BuildHasher, RandomState};

const PAGE: &str = include_str!("page/page.html");
const PARTS: [(&str, &str); 3] = [
    ("/* style.css */", include_str!("page/style.css")),
    ("/* markdown.js */", include_str!("page/markdown.js")),
    ("/* chat.js */", include_str!("page/chat.js")),
];

/// The page, with a content security policy that runs its own script and no other, neither handlers in attributes nor `javascript:` links.
pub async fn page() -> Response {
    // The standard library's hasher has random keys, which make the nonce random.
    let nonce = format!("{:016x}{:016x}", RandomState::new().hash_one(0), RandomState::new().hash_one(1));
    let policy = format!(
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; connect-src 'self'; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'"
    );
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8".to_owned()),
        (header::CONTENT_SECURITY_POLICY, policy),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff".to_owned()),
        (header::REFERRER_POLICY, "no-referrer".to_owned()),
    ];
    (headers, whole(&nonce)).into_response()
}

fn whole(nonce: &str) -> String {
    let page = PAGE.replace("NONCE", nonce);
    PARTS.iter().fold(page, |page, (place, part)| page.replacen(place, part, 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_whole_and_loads_nothing() {
        let page = whole("n");
        assert!(PARTS.iter().all(|(place, part)| !page.contains(place) && page.contains(part)));
        assert_eq!(page.matches("<script").count(), 1);
        assert!(page.contains("<script nonce=\"n\">") && !page.contains("src="));
        assert!(!page.contains("innerHTML") && !page.contains("insertAdjacentHTML"), "answers are never HTML");
    }
}
